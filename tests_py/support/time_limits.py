# SPDX-License-Identifier: Apache-2.0
"""How long a test waits, and what it allows beyond a limit that the library promises.

Limits are measured by `time.monotonic`. A test that asserts one writes the promise and adds
`BUSY`; one that waits for what should happen, without a promise about when, waits `PATIENCE`.
"""

from __future__ import annotations

# What a machine with several times more busy processes than processors adds to a limit: to send a
# signal, to run the handler, to unwind and to say so.
BUSY = 1.0

# After this many seconds what has not happened never will, on such a machine too.
PATIENCE = 120.0

# CPU seconds that `import cpattn` takes beyond NumPy. Time spent waiting for a processor is not
# among them, and of several imports the least counts, of which busy neighbours took the caches
# least: beyond that nothing is added. It takes a third of this where bytecode is not cached.
IMPORT_CPU = 0.1
