"""How far the audit log of each replica has come, told to all the others.

Rule: what is told is a number and a MAC; it proves something only once it stands in another replica's log.
"""

from din_extproc.edge.redis.ledger import Runner, namespace


class AuditHeads:
    """The heads of one network's logs, in one hash.

    Args:
        runner: The link.
        network: Whose logs.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        self._key = f"{namespace(network)}{{audit}}:heads"

    async def exchange(self, replica: str, seq: int, chain: str) -> dict[str, tuple[int, str]]:
        """Tell how far the own log has come, and hear it of the others, by replica.

        Raises:
            LimitsUnavailable: Redis can't be asked.
        """
        await self._runner.call("HSET", self._key, replica, f"{seq}:{chain}")
        told = await self._runner.call("HGETALL", self._key)
        heads = {}
        for name, head in zip(told[::2], told[1::2], strict=True):
            number, _, mac = head.decode().partition(":")
            if number.isdigit() and name.decode() != replica:
                heads[name.decode()] = int(number), mac
        return heads
