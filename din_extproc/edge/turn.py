"""How much is done in one turn of the event loop.

Rule: what is said in a turn leaves at its end, so turns are short. What comes in a burst is answered bit by bit, while those who are
answered already go on; done in one turn it would keep them waiting for the last of it, and whoever works next would idle meanwhile.
"""

from typing import Final

AT_ONCE: Final = 4
"""Messages, answers or steps, of one connection or burst: a millisecond at most."""
