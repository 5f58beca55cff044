"""Exchange of audit log heads between replicas.

Invariant: a head is a sequence number and a MAC. It becomes evidence once another replica has written it to its own log.
"""

from din_extproc.edge.redis.calls import make_namespace
from din_extproc.edge.redis.ledger import Runner


class AuditHeads:
    """The audit log heads of one network, in one hash.

    Args:
        runner: The started client.
        network: Name of the network.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        self._key = f"{make_namespace(network)}{{audit}}:heads"

    async def publish(self, replica: str, seq: int, chain: str) -> dict[str, tuple[int, str]]:
        """Publish the head of this replica's log and return the heads of the other replicas, by replica.

        Raises:
            LimitsUnavailable: Redis is unreachable.
        """
        await self._runner.call("HSET", self._key, replica, f"{seq}:{chain}")
        fields = await self._runner.call("HGETALL", self._key)
        heads = {}
        for name, head in zip(fields[::2], fields[1::2], strict=True):
            number, _, mac = head.decode().partition(":")
            if number.isdigit() and name.decode() != replica:
                heads[name.decode()] = int(number), mac
        return heads
