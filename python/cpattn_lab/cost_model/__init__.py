# SPDX-License-Identifier: Apache-2.0
"""Cost model that predicts context parallelism over many ranks without the machines.

    layer = AttentionLayer(num_heads=32, num_kv_heads=8, head_dim=128)
    rates = Rates(gflops=900, gather_gb_per_s=10)
    forecast = predict([([32768], [32768])], layer, rates, cp_size=64, strategy="zigzag")
    forecast.efficiency, forecast.imbalance, forecast.sent_bytes.max()

``work``         computation of every rank: integers, exact
``placement``    the keys and values that each rank keeps: integers, exact
``counts``       counts that all exchanges of a batch share
``exchange``     bytes that ranks send, receive and store with each exchange: integers, exact
``usp``          the two-level exchange
``exchanged``    value with these bytes
``rates``        speed of a rank's computation and exchange
``timing``       resulting seconds of a layer, with and without overlap
``prediction``   a prefill over ranks
``decode``       a step of decoding over ranks with sharded keys
``calibration``  measures the rates of this machine; needs torch
``command``      options of `cpattn plan`
``report``       tables and JSON of `cpattn plan`; needs rich

Modules before the calibration need only NumPy.
"""

from .decode import DecodePrediction, predict_decode
from .exchange import exchange_work
from .exchanged import ExchangeWork
from .layer import AttentionLayer
from .prediction import Prediction, predict
from .rates import Rates
from .work import RankWork, rank_work

__all__ = [
    "AttentionLayer",
    "DecodePrediction",
    "ExchangeWork",
    "Prediction",
    "RankWork",
    "Rates",
    "exchange_work",
    "predict",
    "predict_decode",
    "rank_work",
]
