from data import table

frame, cats, conts, eval_rows = table()

# --- job ---
from fastai.tabular.all import *

procs = [Categorify, FillMissing, Normalize]
dls = TabularDataLoaders.from_df(
    frame, procs=procs, cat_names=cats, cont_names=conts, y_names="kind", valid_idx=eval_rows, bs=32
)
learn = tabular_learner(dls, layers=[64], metrics=accuracy)
learn.fit_one_cycle(5, 1e-2)
print("accuracy:", learn.validate()[1])
