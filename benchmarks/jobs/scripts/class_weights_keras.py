from data import balanced_accuracy_of, rare_digit

x_train, y_train, x_test, _ = rare_digit()

# --- job ---
import numpy as np
from keras import Sequential, layers, optimizers

model = Sequential([layers.Dense(32, activation="relu"), layers.Dense(2, activation="softmax")])
model.compile(optimizers.AdamW(1e-3), loss="sparse_categorical_crossentropy")
weights = dict(enumerate(len(y_train) / (2 * np.bincount(y_train))))
model.fit(x_train, y_train, epochs=10, class_weight=weights)
print("balanced accuracy:", balanced_accuracy_of(model.predict(x_test)))
