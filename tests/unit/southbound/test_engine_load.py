"""An engine's own metrics page, read for the few numbers that tell how busy it is. Pages in `captures` are real ones."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.membership import Heartbeat, InstanceLoad, NodeState
from din_extproc.southbound.listing import parse_models
from din_extproc.southbound.load import SOURCES, EngineLoad, Rates, add_adapters, add_load

CAPTURES = Path(__file__).parent.parent.parent / "captures"


def capture(name: str) -> bytes:
    return (CAPTURES / f"{name}.txt").read_bytes()


def read(engine: str, page: bytes) -> EngineLoad:
    return SOURCES[engine].read(page)


@pytest.mark.parametrize(
    ("page", "waiting", "running", "usage", "in_use"),
    [
        ("vllm/metrics", 0, 0, 0.0, 0),
        ("vllm/metrics-under-load", 12, 4, 0.000244, 512),
        ("vllm/metrics-kv-saturated", 2, 4, 0.923, 1182),
        ("vllm/metrics-pooling", 0, 0, 0.0, 0),
    ],
)
def test_a_real_vllm_says_what_waits_what_runs_and_how_full_its_cache_is(page, waiting, running, usage, in_use):
    load = read("vllm", capture(page))
    assert (load.waiting, load.running, load.tokens_in_use) == (waiting, running, in_use)
    assert load.kv_cache_usage == pytest.approx(usage, abs=1e-3)


@pytest.mark.parametrize(("page", "waiting", "running"), [("llamacpp/metrics", 0, 0), ("llamacpp/metrics-deferred", 2, 1)])
def test_a_real_llama_cpp_says_what_waits_and_what_runs_but_nothing_of_its_cache(page, waiting, running):
    load = read("llamacpp", capture(page))
    assert (load.waiting, load.running, load.kv_cache_usage) == (waiting, running, None)


def vllm_cache(queries, hits):
    page = b'vllm:prefix_cache_queries_total{engine="0"} %d\nvllm:prefix_cache_hits_total{engine="0"} %d\n' % (queries, hits)
    return read("vllm", page)


def test_vllms_counters_tell_what_its_prefix_cache_brings_lately():
    rates = Rates().update(vllm_cache(1000, 900), vllm_cache(1100, 925), 5.0)
    assert rates.cached_share == 0.25
    later = rates.update(vllm_cache(1100, 925), vllm_cache(1200, 1025), 30.0)
    assert later.cached_share == pytest.approx((0.25 + 1.0) / 2)
    assert later.update(vllm_cache(1200, 1025), vllm_cache(1200, 1025), 30.0).cached_share == later.cached_share
    assert Rates().update(EngineLoad(), EngineLoad(), 5.0).cached_share is None
    assert add_load(vllm_cache(0, 0), later, Heartbeat(state=NodeState.READY, sequence=1)).cached_share == later.cached_share


def test_sglang_tells_its_hit_rate_itself():
    page = read("sglang", b'sglang:cache_hit_rate{model_name="m"} 0.4\n')
    assert Rates(cached_share=0.9).update(page, page, 5.0).cached_share == 0.4


LORA = (
    b"# TYPE vllm:lora_requests_info gauge\n"
    b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09\n'
    b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql,law",waiting_lora_adapters="med"} 1.8e+09\n'
)


def test_vllms_newest_sample_says_which_adapters_requests_use_and_how_many_fit():
    load = read("vllm", LORA)
    assert (load.active_adapters, load.adapter_slots) == (("sql", "law", "med"), 4)
    beat = add_load(load, Rates(), Heartbeat(state=NodeState.READY, sequence=1))
    assert (beat.active_adapters, beat.adapter_slots) == (("sql", "law", "med"), 4)


@pytest.mark.parametrize("page", [b"", b"vllm:lora_requests_info 1.0\n", LORA.replace(b'"4"', b'"many"').replace(b"1.8e+09", b"NaN")])
def test_a_page_without_a_number_of_adapters_tells_none(page):
    assert read("vllm", page).adapter_slots is None


@pytest.mark.parametrize(
    ("engine", "listed", "adapters"),
    [
        (
            "vllm",
            b'{"data":[{"id":"base","parent":null},{"id":"sql","root":"/a","parent":"base"},{"id":"law","parent":"base"}]}',
            ("law", "sql"),
        ),
        ("sglang", b'{"data":[{"id":"base"}]}', ()),
        ("tgi", b'{"data":[{"id":"base"},{"id":"sql","parent":"base"}]}', None),
        ("vllm", b"oops", None),
    ],
)
def test_an_engines_list_of_models_tells_its_adapters(engine, listed, adapters):
    assert add_adapters(parse_models(listed), engine, Heartbeat(state=NodeState.READY, sequence=1)).adapters == adapters


PAGES = {
    "sglang": (
        (
            b"# TYPE sglang:token_usage gauge\n"
            b'sglang:num_queue_reqs{model_name="m"} 5.0\nsglang:num_running_reqs{model_name="m"} 7.0\n'
            b'sglang:token_usage{model_name="m"} 0.28\nsglang:num_used_tokens{model_name="m"} 123859.0\n'
        ),
        EngineLoad(waiting=5, running=7, kv_cache_usage=0.28, tokens_in_use=123859),
    ),
    "tensorrt_llm": (
        b"trtllm_num_requests_waiting 3\ntrtllm_num_requests_running 8\ntrtllm_kv_cache_utilization 0.5\n",
        EngineLoad(waiting=3, running=8, kv_cache_usage=0.5),
    ),
    "triton": (
        b'nv_inference_pending_request_count{model="a",version="1"} 4\nnv_inference_pending_request_count{model="b",version="1"} 2\n',
        EngineLoad(waiting=6, queues=(InstanceLoad("a", waiting=4), InstanceLoad("b", waiting=2))),
    ),
    "tgi": (b"# TYPE tgi_queue_size gauge\ntgi_queue_size 9\ntgi_batch_current_size 4\n", EngineLoad(waiting=9, running=4)),
    "ollama": (b'{"models":[{"name":"llama3:8b","size_vram":5137025024}]}', EngineLoad()),
}


@pytest.mark.parametrize(("engine", "page", "expected"), [(engine, *row) for engine, row in PAGES.items()])
def test_every_engine_has_its_own_names_for_the_same_numbers(engine, page, expected):
    assert read(engine, page) == expected


def test_a_triton_with_a_tensorrt_llm_backend_is_read_by_that_backend():
    page = (
        b'nv_inference_pending_request_count{model="ensemble",version="1"} 1\n'
        b'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1\n'
        b'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 6\n'
        b'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 11\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 40\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.4\n'
    )
    assert read("triton", page) == EngineLoad(waiting=11, running=6, kv_cache_usage=0.4)


def test_an_older_vllm_calls_its_cache_usage_otherwise():
    assert read("vllm", b'vllm:gpu_cache_usage_perc{model_name="m"} 0.75\n').kv_cache_usage == 0.75


def test_the_parts_of_an_engine_add_up_and_shares_are_averaged():
    page = b"".join(
        b'vllm:num_requests_waiting{engine="%d",model_name="m"} %d.0\nvllm:kv_cache_usage_perc{engine="%d",model_name="m"} %f\n'
        % (rank, 3 * rank, rank, 0.25 + rank / 2)
        for rank in (0, 1)
    )
    load = read("vllm", page)
    assert (load.waiting, load.kv_cache_usage) == (3, 0.5)


def test_a_label_may_hold_braces_commas_and_escaped_quotes():
    page = rb'vllm:num_requests_waiting{model_name="a}b,\"c\" 7"} 2.0 1700000000000' + b"\n"
    assert read("vllm", page).waiting == 2


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-3", b"-Inf", b"many", b""])
def test_what_cant_be_a_number_of_requests_is_not_reported(value):
    assert read("vllm", b"vllm:num_requests_waiting " + value + b"\n").waiting is None


def test_a_share_above_one_is_one():
    assert read("vllm", b"vllm:kv_cache_usage_perc 1.0000001\n").kv_cache_usage == 1.0


def test_a_longer_name_and_a_comment_are_not_the_sample():
    page = (
        b'# HELP vllm:num_requests_waiting 9\nvllm:num_requests_waiting_by_reason{reason="capacity"} 12.0\nxvllm:num_requests_waiting 3\n'
    )
    assert read("vllm", page).waiting is None


@given(page=st.binary(max_size=300), engine=st.sampled_from(sorted(SOURCES)))
def test_any_bytes_are_a_page(page, engine):
    names = b"vllm:num_requests_waiting{" + page + b"\nvllm:kv_cache_usage_perc " + page
    for content in (page, names):
        load = read(engine, content)
        assert load.waiting is None or load.waiting >= 0
        assert load.kv_cache_usage is None or 0 <= load.kv_cache_usage <= 1


def test_rates_come_from_what_the_counters_grew():
    before, after = EngineLoad(prompt_tokens=100.0, output_tokens=10.0), EngineLoad(prompt_tokens=1_100.0, output_tokens=310.0)
    assert Rates().update(before, after, 2.0) == Rates(500.0, 150.0)


def test_an_engine_that_measures_its_prefill_time_is_believed():
    before, after = EngineLoad(prompt_tokens=0.0, prompt_seconds=0.0), EngineLoad(prompt_tokens=1_000.0, prompt_seconds=0.5)
    assert Rates().update(before, after, 3.0).prefill == 2_000.0


def test_an_idle_engine_keeps_what_it_has_shown():
    known, idle = Rates(500.0, 150.0), EngineLoad(prompt_tokens=5.0, output_tokens=5.0)
    assert known.update(idle, idle, 3_600.0) == known


def test_light_work_wears_an_old_figure_down_slowly():
    before, after = EngineLoad(output_tokens=0.0), EngineLoad(output_tokens=10.0)
    assert Rates(None, 100.0).update(before, after, 300.0).decode == pytest.approx(50.0)


def test_an_engine_that_began_anew_is_no_negative_rate():
    rates = Rates().update(EngineLoad(output_tokens=1_000.0), EngineLoad(output_tokens=30.0), 3.0)
    assert rates.decode == 10.0
    assert not math.isinf(rates.decode)


def test_a_page_without_counters_teaches_nothing():
    assert Rates().update(EngineLoad(), EngineLoad(), 3.0) == Rates()


def test_two_real_pages_give_real_rates():
    before, after = read("vllm", capture("vllm/metrics")), read("vllm", capture("vllm/metrics-under-load"))
    rates = Rates().update(before, after, 3.0)
    assert rates.decode == pytest.approx((284 - 49) / 3)
    assert rates.prefill == pytest.approx(36 / (18.832197862000385 - 18.81918982600041))


def test_a_heartbeat_carries_the_numbers():
    load = EngineLoad(waiting=2, running=1, kv_cache_usage=0.5, tokens_in_use=640)
    beat = add_load(load, Rates(100.0, 20.0), Heartbeat(state=NodeState.READY, sequence=7))
    assert beat == Heartbeat(
        state=NodeState.READY,
        sequence=7,
        waiting=2,
        running=1,
        kv_cache_usage=0.5,
        tokens_in_use=640,
        prefill_rate=100.0,
        decode_rate=20.0,
    )
