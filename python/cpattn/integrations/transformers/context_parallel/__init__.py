# SPDX-License-Identifier: Apache-2.0
"""A model of transformers over the ranks of a group, in one call.

``model``      the engine: requests, batches, and results
``sequences``  tokens of requests, and the choice of the next ones
``layers``     attention layers: supported models, and calls during a pass
``passes``     exchange and attention of such a call
``pools``      keys and values of all layers
"""

from .model import ContextParallelModel
from .sequences import NewToken, Prefilled

__all__ = ["ContextParallelModel", "NewToken", "Prefilled"]
