from data import table
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

frame, cats, conts, eval_rows = table()
eval_frame, train_frame = frame.loc[eval_rows], frame.drop(index=eval_rows)
columns = make_column_transformer(
    (OneHotEncoder(handle_unknown="ignore"), cats),
    (make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler()), conts),
)
x_train, x_test = columns.fit_transform(train_frame), columns.transform(eval_frame)
y_train, y_test = (
    (part["kind"] == "benign").astype("int64").to_numpy() for part in (train_frame, eval_frame)
)
x_train, x_test = x_train.astype("float32"), x_test.astype("float32")
num_columns = x_train.shape[1]

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer, schedulers

model = nn.Sequential(nn.Linear(num_columns, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = optim.AdamW(model.parameters(), 1e-2)
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, metrics=["accuracy"])
history = trainer.train(
    (x_train, y_train), 5, (x_test, y_test), 32, create_scheduler_fn=schedulers.one_cycle()
)
print("accuracy:", history.get_latest_metric("eval_accuracy"))
