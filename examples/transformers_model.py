"""A model from transformers, which computes its loss itself: batches are dicts, and there is no loss function.

A small BERT, with random weights, reads digits pixel by pixel, like sentences of 64 words.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification

from pytorch_accelerated import Trainer, TrainerPlaceholderValues, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, MetricsCallback
