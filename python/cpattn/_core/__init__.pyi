# Types of the compiled core, a file for each room. The core itself is one module.
# ruff: noqa: F403
from . import reference as reference
from ._attention import *
from ._base import *
from ._base import __compiler__ as __compiler__
from ._base import __version__ as __version__
from ._context_parallel import *
from ._kv import *
from ._npu import *
from ._sparse import *
from ._transfer import *
