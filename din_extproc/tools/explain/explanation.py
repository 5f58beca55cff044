"""The output of `din-extproc explain`, as JSON for machines and as lines for people."""

from msgspec import Struct

from din_extproc.domain.price import UNITS
from din_extproc.domain.request import Intent, Metering
from din_extproc.domain.verdict import Refusal
from din_extproc.route.rule_evaluation import RuleEvaluation


class ExplainedIntent(Struct, frozen=True, omit_defaults=True):
    """The intent that was read from the request."""

    path: str
    model: str
    prompt_tokens: int
    output_tokens: int | None = None
    """None: the client did not say."""
    stream: bool = False
    timeout_ms: int | None = None
    budget_tokens: int | None = None
    budget_cost: float | None = None
    """In the currency of `prices`."""
    task_tier: str = ""
    version: str = ""
    priority: str = ""
    charged_for: str = ""
    """The unit that the operation is charged for; "": prompt and output."""
    images: int = 0
    audio_seconds: int = 0
    """Estimated."""
    prefix: str = ""
    """The same for prompts that begin alike, or for the requests of one session."""
    session: str = ""
    """The source of the session's name: a header, `prompt_cache_key` or `conversation`; "": there is none."""

    @classmethod
    def of(cls, intent: Intent, prefix: int, session: str = "") -> "ExplainedIntent":
        """An intent, in short."""
        return cls(
            path=intent.operation.value,
            model=intent.model,
            prompt_tokens=intent.prompt_tokens,
            output_tokens=intent.output_tokens,
            stream=intent.stream,
            timeout_ms=intent.timeout_ms,
            budget_tokens=intent.budget_tokens,
            budget_cost=None if intent.budget_cost is None else intent.budget_cost / UNITS,
            task_tier=intent.task_tier,
            version=intent.version,
            priority=intent.priority.value if intent.priority else "",
            charged_for="" if intent.operation.spec.metering is Metering.TOKENS else intent.operation.spec.metering.value,
            images=intent.images,
            audio_seconds=intent.audio_seconds,
            prefix=f"{prefix:08x}" if prefix else "",
            session=session,
        )


class Candidate(Struct, frozen=True, omit_defaults=True):
    """A node that was looked at."""

    node: str
    pool: str
    place: int | None = None
    """1 is the one that is picked, the next ones are for retries; None: not named to Envoy."""
    score: float | None = None
    """The value by which the pool's scheduler ranks, least first; None: the node was dropped."""
    why: str = ""
    """The score in words, or why it was dropped."""


class Explanation(Struct, frozen=True, omit_defaults=True):
    """The decision, and the steps that lead to it."""

    sent: bool
    tenant: str | None = None
    identity: str | None = None
    """Its identity; None: any key of the tenant."""
    intent: ExplainedIntent | None = None
    rules: tuple[RuleEvaluation, ...] = ()
    """Those that were looked at, in order; the last one takes the request, if one does."""
    rule: str | None = None
    """"": no rule matched, the model's own pool takes it."""
    alias: str | None = None
    """The name by which the requested one was found: itself, or an alias with `*`."""
    model: str | None = None
    pool: str | None = None
    fallback: str | None = None
    degraded: str | None = None
    """Why it is the fallback that takes it."""
    scheduler: str | None = None
    node_path: str | None = None
    """Where the engine is asked in its own words; None: in OpenAI's."""
    left_out: str | None = None
    """Parameters that the engine can't be told."""
    long: bool = False
    """It belongs to the pool's long tail."""
    timeout_ms: int | None = None
    """How long Envoy waits, where client or pool say."""
    first_byte_ms: int | None = None
    """How long a node may take to begin, where the pool says."""
    candidates: tuple[Candidate, ...] = ()
    nodes: tuple[str, ...] = ()
    """In the order in which they would be tried."""
    moves_to: str | None = None
    """The node of the fallback that is tried in flight when these have failed."""
    leaves_site_to: tuple[str, ...] = ()
    """The hosted APIs that the prompt goes to, at once or in flight."""
    refusal: str | None = None
    status: int | None = None
    message: str | None = None

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = [] if self.identity is None else [f"tenant    {self.tenant}, known by {self.identity}"]
        lines += [] if self.intent is None else _describe_intent(self.intent)
        for trial in self.rules:
            name = trial.rule or "(no rule)"
            lines.append(
                f"rule      {'*' if trial.matched else '-'} {name} -> {trial.pool}"
                + (": " + "; ".join(trial.reasons) if trial.reasons else "")
            )
        if self.model is not None:
            alias = self.alias if self.intent is None or self.alias != self.intent.model else ""
            lines.append(f"model     {self.model}" + (f", by the alias {alias}" if alias else ""))
            lines.append(f"pool      {self.pool}" + (f", fallback {self.fallback}" if self.fallback else ""))
        if self.degraded:
            lines.append(f"degraded  the fallback takes it: {self.degraded}")
        if self.node_path:
            lines.append(f"engine    asked in its own words: {self.node_path}")
        if self.left_out:
            lines.append(f"left out  {self.left_out}: the engine can't be told")
        if self.scheduler:
            lines.append(f"scheduler {self.scheduler}" + (", for a request of the long tail" if self.long else ""))
        for each in self.candidates:
            mark = "-" if each.score is None else str(each.place or " ")
            lines.append(f"node      {mark} {each.node}: {each.why}")
        if self.nodes:
            then = f", then in flight {self.moves_to}" if self.moves_to else ""
            leaves = "".join(f"; leaves the site: {each}" for each in self.leaves_site_to)
            lines.append(f"nodes     {', '.join(self.nodes)}{then}{leaves}")
        if self.timeout_ms is not None:
            lines.append(f"timeout   {self.timeout_ms} ms")
        if self.first_byte_ms is not None:
            lines.append(f"timeout   {self.first_byte_ms} ms until the answer begins, then the next node")
        if self.refusal is not None:
            lines.append(f"refused   {self.status} {self.refusal}: {self.message}")
        return lines


def _describe_intent(intent: ExplainedIntent) -> list[str]:
    output = "not limited by the client" if intent.output_tokens is None else f"at most {intent.output_tokens} tokens"
    more = [
        f"{name} {text}" for name, text in (("tier", intent.task_tier), ("version", intent.version), ("priority", intent.priority)) if text
    ]
    limits = (("deadline in ms", intent.timeout_ms), ("budget in tokens", intent.budget_tokens), ("budget in money", intent.budget_cost))
    more += [f"{name} {limit:g}" for name, limit in limits if limit is not None]
    measured = (("images", intent.images), ("seconds of audio", intent.audio_seconds))
    charged = [f"charged   for {intent.charged_for}" + "".join(f", {number} {name}" for name, number in measured if number)]
    return [
        f"asks      {intent.path} of {intent.model!r}" + "".join(f", {each}" for each in more) + (", as a stream" if intent.stream else ""),
        f"prompt    about {intent.prompt_tokens} tokens; output {output}",
        *(charged if intent.charged_for else ()),
    ]


def refused(refusal: Refusal, intent: ExplainedIntent | None = None, rules: tuple[RuleEvaluation, ...] = ()) -> Explanation:
    """The request is answered here."""
    code = refusal.code
    return Explanation(sent=False, intent=intent, rules=rules, refusal=code.code, status=code.status, message=refusal.message)
