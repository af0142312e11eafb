from data import accuracy_of_onnx, digits

x_train, y_train, _, _ = digits()

# --- job ---
from keras import Sequential, layers, optimizers

model = Sequential([layers.Dense(64, activation="relu"), layers.Dense(10, activation="softmax")])
model.compile(optimizers.AdamW(1e-2), loss="sparse_categorical_crossentropy")
model.fit(x_train, y_train, epochs=5)
model.export("digits.onnx", format="onnx")
print("accuracy:", accuracy_of_onnx("digits.onnx"))
