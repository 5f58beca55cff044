"""Engines that speak OpenAI's words get the client's bytes and the client gets theirs: only what is spliced differs.

The oracle is the text that was written: each body is spelled twice, once as the client sends it and once with the splices in place.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from din_extproc.domain.node import Pool
from din_extproc.domain.request import RequestHead
from din_extproc.flow.node_request import NodeRequest, build_node_request
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.southbound.engines import ENGINES
from tests.property.test_dialect_streams import cut
from tests.support.lua_filter import JSON, UsageFilter
from tests.support.odd_json import NUMBERS, Speller

ODD_NAMES = {
    "model": '"mod\\u0065l"',
    "messages": '"m\\u0065ssages"',
    "stream": '"\\u0073tream"',
    "stream_options": '"stream_option\\u0073"',
}
OURS = '"stream_options":{"include_usage":true}'
seeds = st.integers(0, 2**64)


def unread(speller: Speller) -> dict[str, str]:
    """Members that the gateway has no use for."""
    found = {"temperature": "1.50", "seed": speller.random.choice(NUMBERS), "x\\u002dvendor": speller.value(), "metadata": speller.object()}
    names = speller.random.sample(sorted(found), speller.random.randrange(len(found) + 1))
    return {f'"{name}"': found[name] for name in names}


def options_of(speller: Speller) -> tuple[str, str]:
    """`stream_options` that don't ask for usage, as sent and as the engine gets them."""
    inner = speller.member('"x"', speller.value())
    gap = speller.gap()
    return speller.random.choice(
        [
            ("null", '{"include_usage":true}'),
            (f"{{{gap}{inner}}}", f'{{"include_usage":true,{gap}{inner}}}'),
            (f'{{"include_usage"{gap}:{gap}false,{inner}}}', f'{{"include_usage"{gap}:{gap}true,{inner}}}'),
        ]
    )


def spelled(seed: int, *, streams: bool, tells: bool, same_name: bool) -> tuple[bytes, bytes]:
    """A chat request, and what an engine that calls the model 'physical' is to get."""
    speller = Speller(seed, lone=True, twice=True)
    choose = speller.random.choice
    sent = {
        '"model"': choose(['"physical"', '"physic\\u0061l"']) if same_name else choose(['"alias"', '"al\\u0069as"']),
        '"messages"': f'[{{"role":"user",{speller.gap()}"content":{speller.string()},"x":{speller.value()}}}]',
        **unread(speller),
    }
    changed = {} if same_name else {'"model"': '"physical"'}
    inserted = ""
    if streams:
        sent['"stream"'] = "true"
        if tells:
            sent['"stream_options"'] = '{"include_usage":true , "x":1}'
        elif choose([True, False]):
            sent['"stream_options"'], changed['"stream_options"'] = options_of(speller)
        else:
            inserted = OURS + ","
    names = list(sent)
    speller.random.shuffle(names)
    state = speller.random.getstate()

    def written(values: dict[str, str]) -> str:
        speller.random.setstate(state)
        keys = [choose([name, ODD_NAMES.get(json.loads(name), name)]) for name in names]
        return speller.joined([speller.member(key, values[name]) for key, name in zip(keys, names, strict=True)])

    body, wanted = written(sent), written({**sent, **changed})
    return body.encode(), f"{wanted[0]}{inserted}{wanted[1:]}".encode()


@settings(deadline=None, max_examples=300)
@given(seed=seeds, engine=st.sampled_from(sorted(ENGINES)), streams=st.booleans(), tells=st.booleans(), same_name=st.booleans())
def test_a_request_reaches_the_engine_as_it_was_sent_but_for_what_is_spliced(seed, engine, streams, tells, same_name):
    body, wanted = spelled(seed, streams=streams, tells=tells, same_name=same_name)
    reading = parse_request(RequestHead("POST", "/v1/chat/completions", {}), body, lambda _name: TokenCalibrator(), 1 << 20)
    assert isinstance(reading, ParsedRequest), reading
    made = build_node_request(reading, reading.intent, Pool("p", "physical", "physical", engine=engine, scheduler="round_robin", nodes=()))
    assert isinstance(made, NodeRequest)
    assert (made.body, made.path, made.headers, made.dialect) == (wanted, "/v1/chat/completions", (), None)
    assert made.strips_usage == (streams and not tells)
    assert (made.body is body) == (same_name and not made.strips_usage), "what needs no splice is not even copied"


@pytest.fixture(scope="module")
def usage() -> UsageFilter:
    return UsageFilter()


@settings(deadline=None, max_examples=300)
@given(seed=seeds, places=st.lists(st.integers(min_value=0), max_size=12))
def test_a_whole_answer_reaches_the_client_as_it_was_sent_wherever_it_is_cut(usage, seed, places):
    speller = Speller(seed, lone=True, twice=True)
    numbers = [speller.random.randrange(10**9) for _ in range(2)]
    counts = speller.joined([speller.member('"prompt_tokens"', numbers[0]), speller.member('"completion_tokens"', numbers[1])])
    members = [f'"choices":[{speller.value()}]', speller.member('"x"', speller.value()), speller.member('"usage"', counts)]
    body = speller.joined(members).encode()
    played = usage.play(cut(body, places), headers=JSON)
    assert (played.out, played.log) == (body, "")
    assert (played.facts["prompt_tokens"], played.facts["completion_tokens"]) == tuple(numbers)


@settings(deadline=None, max_examples=300)
@given(seed=seeds, places=st.lists(st.integers(min_value=0), max_size=12), strip=st.booleans())
def test_a_stream_reaches_the_client_as_it_was_sent_but_for_the_event_that_we_asked_for(usage, seed, places, strip):
    speller = Speller(seed, lone=True, twice=True)
    end = speller.random.choice(["\n\n", "\r\n\r\n"])
    chunks = [f'{{"choices":[{{"index":0,"delta":{{"content":{speller.string()}}},"x":{speller.value()}}}]}}' for _ in range(3)]
    finish = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
    before = "".join(f"data: {chunk}{end}" for chunk in [*chunks, finish])
    ours = f'data: {{"choices": [],"x":{speller.string()},"usage":{{"prompt_tokens":1,"completion_tokens":2}}}}{end}'
    stream, kept = f"{before}{ours}data: [DONE]{end}".encode(), f"{before}data: [DONE]{end}".encode()
    assert usage.play(cut(stream, places), strip=strip).out == (kept if strip else stream)
