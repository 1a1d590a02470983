# SPDX-License-Identifier: Apache-2.0
"""Cost model: what context parallelism over many ranks will cost, without so many machines.

    layer = AttentionLayer(num_heads=32, num_kv_heads=8, head_dim=128)
    rates = Rates(gflops=900, gather_gb_per_s=10)
    forecast = predict([([32768], [32768])], layer, rates, cp_size=64, strategy="zigzag")
    forecast.efficiency, forecast.imbalance, forecast.sent_bytes.max()

``work``         what every rank has to compute: integers, exact
``placement``    which rank keeps which keys and values: integers, exact
``counts``       what all ways to exchange a batch have in common
``exchange``     what ranks send, receive and store by each of them: integers, exact
``usp``          the one of two levels
``exchanged``    the value that says so
``rates``        how fast a rank computes and exchanges
``timing``       the seconds of a layer that follow, with and without overlap
``prediction``   a prefill over ranks
``decode``       a step of decoding over ranks that share the keys
``calibration``  the rates of this machine, measured; needs torch
``command``      what `cpattn plan` is asked
``report``       tables and JSON of `cpattn plan`; needs rich

Modules before the calibration need NumPy only.
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
