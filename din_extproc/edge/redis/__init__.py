"""The shared counters in Redis: a link of our own, the scripts, the ledger over both, and what holds when Redis is away."""
