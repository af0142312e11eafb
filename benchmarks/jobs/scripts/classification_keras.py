from data import digits

x_train, y_train, x_test, y_test = digits()

# --- job ---
from keras import Sequential, layers, metrics, optimizers, utils

y_train, y_test = utils.to_categorical(y_train), utils.to_categorical(y_test)
model = Sequential([layers.Dense(64, activation="relu"), layers.Dense(10, activation="softmax")])
watched = ["accuracy", metrics.F1Score("macro"), metrics.AUC(multi_label=True)]
model.compile(optimizers.AdamW(3e-3), loss="categorical_crossentropy", metrics=watched)
model.fit(x_train, y_train, epochs=10, validation_data=(x_test, y_test))
scores = model.evaluate(x_test, y_test, return_dict=True)
print(scores)
print("f1:", scores["f1_score"])
