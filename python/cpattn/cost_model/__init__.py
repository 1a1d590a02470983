# SPDX-License-Identifier: Apache-2.0
"""What context parallelism over many ranks will cost, before there are that many machines.

    layer = AttentionLayer(num_heads=32, num_kv_heads=8, head_dim=128)
    rates = Rates(gflops=900, gather_gbps=10)
    forecast = predict([([32768], [32768])], layer, rates, cp_size=64, strategy="zigzag")
    forecast.efficiency, forecast.imbalance, forecast.sent_bytes.max()

``work``         what every rank has to compute and to send: integers, exact
``rates``        how fast a rank computes and exchanges
``prediction``   the seconds that follow
``calibration``  the rates of this machine, measured; needs torch
``report``       tables and JSON of `cpattn plan`; needs rich

The first three need NumPy only.
"""

from .prediction import Prediction, predict
from .rates import Rates
from .work import AttentionLayer, RankWork, rank_work

__all__ = ["AttentionLayer", "Prediction", "RankWork", "Rates", "predict", "rank_work"]
