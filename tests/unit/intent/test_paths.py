import pytest

from din_extproc.domain.request import Operation
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.intent.paths import EndpointKind, find_endpoint_kind


@pytest.mark.parametrize("operation", [operation for operation in Operation if operation is not Operation.MODELS])
@pytest.mark.parametrize("suffix", ["", "/", "?api-version=1", "/?a=b#c", "?x=/v1/models"])
def test_a_query_and_one_trailing_slash_are_the_same_path(operation, suffix):
    assert find_endpoint_kind("POST", operation.value + suffix) == EndpointKind(operation)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/v1/chat%2Fcompletions",
        "/V1/chat/completions",
        "/v1/Chat/completions",
        "/v1/chat/completions#x",
        "/v1/chat/completions//",
        "/v1/chat/completions;a=b",
        "/v1/chat/../chat/completions",
        "/v1/chat/completions%20",
        " /v1/chat/completions",
        "/chat/completions",
        "/v1",
        "/v1/modelsx",
        "/",
        "",
        "*",
        "http://host/v1/chat/completions",
    ],
)
def test_every_other_spelling_is_unknown(path):
    for method in ("POST", "GET"):
        found = find_endpoint_kind(method, path)
        assert isinstance(found, Refusal)
        assert found.code is RefusalCode.PATH_NOT_FOUND


def test_cohere_s_path_of_rerank_is_the_same_as_jina_s():
    assert find_endpoint_kind("POST", "/v2/rerank/?x=1") == EndpointKind(Operation.RERANK)


def test_a_known_path_with_another_method_says_which_one_it_takes():
    for method in ("GET", "PUT", "DELETE", "PATCH", "post", ""):
        found = find_endpoint_kind(method, "/v1/embeddings")
        assert found.code is RefusalCode.METHOD_NOT_ALLOWED
        assert found.headers == (("allow", "POST"),)
    for path in ("/v1/models", "/v1/models/", "/v1/models/x"):
        assert find_endpoint_kind("POST", path).headers == (("allow", "GET, HEAD"),)
        assert isinstance(find_endpoint_kind("HEAD", path), EndpointKind)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models", ""),
        ("/v1/models/", ""),
        ("/v1/models?limit=3", ""),
        ("/v1/models/missing", "missing"),
        ("/v1/models/hf.co/unsloth/Qwen3:Q4_K_M", "hf.co/unsloth/Qwen3:Q4_K_M"),
        ("/v1/models/hf.co%2Funsloth%2FQwen3%3AQ4_K_M", "hf.co/unsloth/Qwen3:Q4_K_M"),
        ("/v1/models/hf.co/unsloth/Qwen3:Q4_K_M/?x=1", "hf.co/unsloth/Qwen3:Q4_K_M"),
        ("/v1/models/%E6%A8%A1%E5%9E%8B", "模型"),
    ],
)
def test_a_model_with_slashes_is_found_by_both_spellings(path, name):
    assert find_endpoint_kind("GET", path) == EndpointKind(Operation.MODELS, name)


@pytest.mark.parametrize("name", ["%00", "a%0Ab", "a%1b[2J", "x" * 257, "//"])
def test_a_name_that_no_model_has_is_not_found(name):
    found = find_endpoint_kind("GET", f"/v1/models/{name}")
    assert found.code is RefusalCode.MODEL_NOT_FOUND if name != "//" else isinstance(found, EndpointKind)


@pytest.mark.parametrize("path", ["/v1/usage", "/v1/usage/", "/v1/usage?days=7"])
def test_usage_is_read_like_the_model_list(path):
    assert find_endpoint_kind("GET", path) == EndpointKind(Operation.MODELS, usage=True)
    refused = find_endpoint_kind("POST", path)
    assert isinstance(refused, Refusal)
    assert refused.code is RefusalCode.METHOD_NOT_ALLOWED
