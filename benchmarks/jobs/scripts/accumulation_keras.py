from data import accuracy_of, digits

x_train, y_train, _, _ = digits()

# --- job ---
from keras import Sequential, config, layers, optimizers

config.set_dtype_policy("mixed_bfloat16")
model = Sequential([layers.Dense(64, activation="relu"), layers.Dense(10, activation="softmax")])
optimizer = optimizers.AdamW(1e-2, gradient_accumulation_steps=4, global_clipnorm=1.0)
model.compile(optimizer, loss="sparse_categorical_crossentropy")
model.fit(x_train, y_train, epochs=10)
print("accuracy:", accuracy_of(model))
