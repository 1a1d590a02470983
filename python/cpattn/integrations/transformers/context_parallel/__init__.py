# SPDX-License-Identifier: Apache-2.0
"""A model of transformers over the ranks of a group, in one call.

``model``      the engine: requests, batches, and what it returns
``sequences``  their tokens, and the choice of the next ones
``layers``     attention layers: which models can run, and their calls during a pass
``passes``     what such a call does: exchange and attend
``pools``      keys and values of all layers
"""

from .model import ContextParallelModel
from .sequences import NewToken, Prefilled

__all__ = ["ContextParallelModel", "NewToken", "Prefilled"]
