"""State shared through Redis: the client, the Lua scripts, the ledger on top of them, and the fallback while Redis is unreachable."""
