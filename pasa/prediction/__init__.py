"""Predict from the weights alone which attention heads can overflow FP16; no input and no forward pass is needed."""

from pasa.prediction.predict import predict_overflow
from pasa.prediction.table import HeadPrediction, Prediction, StreamPrediction

__all__ = ["HeadPrediction", "Prediction", "StreamPrediction", "predict_overflow"]
