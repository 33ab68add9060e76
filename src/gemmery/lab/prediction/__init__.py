"""The time of a product on any GPU of the device table, for gemmery and for the vendor's BLAS, without a GPU.

`ours` and `vendor` say what is launched for a problem, and have a law of its time each; `calibration` has the constants
of the laws, and what corrects them, from data/, which benchmarks/fit_prediction.py makes of recorded measurements;
`recorded` reads these.
"""

from .predict import Prediction, predict

__all__ = ["Prediction", "predict"]
