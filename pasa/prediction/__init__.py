"""Which attention layers and heads can overflow, from the weights alone: no prompt, no forward pass."""

from pasa.prediction.predict import predict_overflow
from pasa.prediction.table import HeadPrediction, Prediction

__all__ = ["HeadPrediction", "Prediction", "predict_overflow"]
