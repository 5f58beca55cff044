"""Limit of work in one event loop iteration.

Invariant: writes leave at the end of an iteration, so iterations are short. A burst is processed in slices, so that its first results
leave before its last ones are ready.
"""

from typing import Final

AT_ONCE: Final = 8
"""Messages, responses or steps of one connection or burst per iteration: at most two milliseconds."""
