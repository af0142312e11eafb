from data import accuracy_of, digits

x_train, y_train, _, _ = digits()

# --- job ---
from keras import Sequential, layers, optimizers

model = Sequential(
    [
        layers.Dense(64, activation="relu"),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax", name="head"),
    ]
)
optimizer = optimizers.Muon(3e-3, exclude_layers=["head"])
model.compile(optimizer, loss="sparse_categorical_crossentropy")
model.fit(x_train, y_train, epochs=5)
print("accuracy:", accuracy_of(model))
