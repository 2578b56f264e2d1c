"""The flags of `vllm serve` as `ttpu serve` takes them: those with another name or form here, those without effect, and
those that are refused with the reason. A flag that is in no table has the same name and meaning here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Takes = Literal["nothing", "a value", "values"]


@dataclass(frozen=True)
class Renamed:
    """A flag with another name or form here. takes: what follows it. words: makes the words of `ttpu serve` of the
    value ("" if the flag takes none). told: the same for readers."""

    takes: Takes
    words: Callable[[str], list[str]]
    told: str


@dataclass(frozen=True)
class Ignored:
    """A flag that is accepted, with a note, because it changes nothing here. values: those that change nothing, others
    are refused; None are all."""

    takes: Takes
    reason: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Refused:
    """A flag that is not served. reason: a clause that ends with what to do."""

    reason: str


SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
    "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count",
}
"""Short forms and second names of flags."""

SAME = (
    "--host", "--port", "--uds", "--root-path", "--api-key", "--served-model-name", "--chat-template",
    "--tool-call-parser", "--reasoning-parser", "--lora-modules", "--max-lora-rank", "--max-logprobs", "--ssl-certfile",
    "--ssl-keyfile", "--revision", "--tokenizer", "--config", "--otlp-traces-endpoint",
    "--default-chat-template-kwargs",
)  # fmt: skip
"""Flags with the same name and meaning."""

SEVERAL = ("--api-key", "--served-model-name", "--lora-modules", "--allowed-origin", "--allowed-host")
"""Options that vLLM's users give several values at once, after the checkpoint."""

GIB = 2**30
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def number(text: str) -> int | None:
    """Return a number as vLLM reads it: 8k is 8000, 8K is 8192, 1.5k is 1500; None if it is none."""
    unit = _UNITS.get(text[-1:], 0)
    try:
        return int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        return None


def _same(option: str, values: Mapping[str, str] | None = None) -> Callable[[str], list[str]]:
    return lambda value: [option, (values or {}).get(value, value)]


def _counted(option: str) -> Callable[[str], list[str]]:
    def words(value: str) -> list[str]:
        found = number(value)
        return [option, value if found is None else str(found)]

    return words


def _length(value: str) -> list[str]:
    return [] if value in ("-1", "auto") else _counted("--max-model-len")(value)


def _bytes_of_cache(value: str) -> list[str]:
    found = number(value)
    return ["--kv-cache-memory", value if found is None else f"{found / GIB:.10g}"]


def _nothing(_: str) -> list[str]:
    return []


def _switch(*words: str) -> Callable[[str], list[str]]:
    return lambda _: list(words)


def _policy(value: str) -> list[str]:
    return {"fcfs": [], "priority": ["--allow-priority"]}.get(value, ["--scheduling-policy", value])


def _level(value: str) -> list[str]:
    return ["--log-level", {"critical": "error", "trace": "debug"}.get(value, value)]


OWN_FORMATS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "auto-round")


def _quantization(value: str) -> list[str]:
    return [] if value in OWN_FORMATS else ["--quantization", value]


RENAMED: Mapping[str, Renamed] = {
    "--model": Renamed("a value", lambda value: ["--weights-dir", value], "CHECKPOINT"),
    "--gpu-memory-utilization": Renamed(
        "a value", _same("--memory-utilization"), "--memory-utilization: of the memory that is free after loading"
    ),
    "--kv-cache-memory-bytes": Renamed("a value", _bytes_of_cache, "--kv-cache-memory, in GiB"),
    "--block-size": Renamed("a value", _same("--page-size"), "--page-size"),
    "--max-model-len": Renamed("a value", _length, "the same; 8k is 8000, 8K is 8192, -1 and auto as without it"),
    "--max-num-batched-tokens": Renamed("a value", _counted("--max-num-batched-tokens"), "the same"),
    "--max-num-seqs": Renamed("a value", _counted("--max-num-seqs"), "the same"),
    "--dtype": Renamed(
        "a value", _same("--dtype", {"half": "float16", "float": "float32"}), "the same; auto is as stored"
    ),
    "--kv-cache-dtype": Renamed(
        "a value", _same("--kv-cache-dtype", {"fp8_e4m3": "fp8"}), "the same; fp8_e4m3 is fp8, fp8_e5m2 is refused"
    ),
    "--quantization": Renamed(
        "a value", _quantization,
        f"--quantization quantizes while loading; {', '.join(OWN_FORMATS)} are read from the checkpoint",
    ),
    "--enable-prefix-caching": Renamed("nothing", _nothing, "on, unless --no-prefix-caching is given"),
    "--no-enable-prefix-caching": Renamed("nothing", _switch("--no-prefix-caching"), "--no-prefix-caching"),
    "--enable-chunked-prefill": Renamed("nothing", _nothing, "on, unless --no-chunked-prefill is given"),
    "--no-enable-chunked-prefill": Renamed("nothing", _switch("--no-chunked-prefill"), "--no-chunked-prefill"),
    "--max-loras": Renamed("a value", _same("--max-adapters"), "--max-adapters"),
    "--speculative-config": Renamed("a value", _same("--speculative"), "--speculative, which takes this JSON as well"),
    "--scheduling-policy": Renamed("a value", _policy, "priority is --allow-priority, fcfs nothing"),
    "--enable-auto-tool-choice": Renamed("nothing", _nothing, "on, where the template or --tool-call-parser tells how"),
    "--allowed-origins": Renamed("values", _same("--allowed-origin"), "--allowed-origin, a JSON list as well"),
    "--generation-config": Renamed("a value", _same("--generation-config", {"vllm": "none"}), "the same; vllm is none"),
    "--enable-log-requests": Renamed("nothing", _switch("--access-log"), "--access-log: no prompts"),
    "--uvicorn-log-level": Renamed("a value", _level, "--log-level"),
    "--enable-sleep-mode": Renamed("nothing", _switch("--enable-admin"), "--enable-admin"),
    "--enable-expert-parallel": Renamed(
        "nothing", _switch("--sharding-rules", "expert=tensor"),
        "--sharding-rules expert=tensor, of several devices: each has some whole experts, not a part of every expert",
    ),
    "--no-enable-expert-parallel": Renamed("nothing", _nothing, "the default"),
    "--enable-lora": Renamed(
        "nothing", _switch("--max-adapters", "1"), "--max-adapters 1, if it has no value and no adapters are named"
    ),
}
"""--tensor-parallel-size and its kin become one --parallelism-strategy (`ttpu_serve.cli.vllm_arguments`)."""

PARALLEL = {
    "--tensor-parallel-size": "tensor",
    "--data-parallel-size": "data",
    "--pipeline-parallel-size": "stage",
    "--decode-context-parallel-size": "sequence",
}
"""Flags of parallelism → mesh axis."""

_COMPILED = "programs are always compiled"
_ONE_PROCESS = "one process drives all devices"
_TEXT = "text alone is served"
_LOGS = "no prompts or statistics are logged; /metrics has them"

IGNORED: Mapping[str, Ignored] = {
    "--enforce-eager": Ignored("nothing", _COMPILED),
    "--compilation-config": Ignored("a value", _COMPILED),
    "--optimization-level": Ignored("a value", _COMPILED),
    "--cuda-graph-sizes": Ignored("values", _COMPILED),
    "--max-seq-len-to-capture": Ignored("a value", _COMPILED),
    "--num-scheduler-steps": Ignored("a value", "a step is prepared while the one before runs"),
    "--async-scheduling": Ignored("nothing", "a step is prepared while the one before runs"),
    "--no-async-scheduling": Ignored("nothing", "a step is prepared while the one before runs"),
    "--swap-space": Ignored("a value", "preempted requests are computed again"),
    "--seed": Ignored("a value", "each request without a seed draws its own: pass seed in requests"),
    "--disable-log-stats": Ignored("nothing", _LOGS),
    "--disable-log-requests": Ignored("nothing", _LOGS),
    "--no-enable-log-requests": Ignored("nothing", _LOGS),
    "--disable-uvicorn-access-log": Ignored("nothing", "requests are logged with --access-log only"),
    "--max-log-len": Ignored("a value", _LOGS),
    "--enable-request-id-headers": Ignored("nothing", "every response has X-Request-Id"),
    "--enable-prompt-tokens-details": Ignored("nothing", "usage always has prompt_tokens_details"),
    "--disable-fastapi-docs": Ignored("nothing", "those pages are not served"),
    "--disable-custom-all-reduce": Ignored("nothing", "the compiler chooses how devices communicate"),
    "--distributed-executor-backend": Ignored("a value", _ONE_PROCESS),
    "--max-parallel-loading-workers": Ignored("a value", "weights are streamed"),
    "--api-server-count": Ignored("a value", _ONE_PROCESS, ("1",)),
    "--load-format": Ignored("a value", "safetensors are read", ("auto", "safetensors", "hf")),
    "--config-format": Ignored("a value", "config.json is read", ("auto", "hf")),
    "--tokenizer-mode": Ignored("a value", "transformers reads the tokenizer", ("auto", "hf", "slow")),
    "--model-impl": Ignored("a value", "the backend chooses", ("auto",)),
    "--runner": Ignored("a value", "the checkpoint decides", ("auto", "generate", "pooling")),
    "--convert": Ignored("a value", "the checkpoint decides", ("auto", "none", "embed")),
    "--task": Ignored("a value", "the checkpoint decides", ("auto", "generate", "embed", "embedding")),
    "--device": Ignored("a value", "JAX_PLATFORMS chooses", ("auto", "tpu")),
    "--cpu-offload-gb": Ignored("a value", "weights stay on the devices", ("0", "0.0")),
    "--response-role": Ignored("a value", "it is always assistant", ("assistant",)),
    "--guided-decoding-backend": Ignored("a value", "llguidance is the only one"),
    "--structured-outputs-config": Ignored("a value", "llguidance is the only backend; see --guides"),
    "--limit-mm-per-prompt": Ignored("a value", _TEXT),
    "--mm-processor-kwargs": Ignored("a value", _TEXT),
    "--disable-mm-preprocessor-cache": Ignored("nothing", _TEXT),
    "--mm-processor-cache-gb": Ignored("a value", _TEXT),
    "--language-model-only": Ignored("nothing", _TEXT),
    "--skip-mm-profiling": Ignored("nothing", _TEXT),
    "--chat-template-content-format": Ignored("a value", "templates get text", ("auto", "string")),
    "--prefix-caching-hash-algo": Ignored("a value", "tokens are compared, not hashes"),
    "--allowed-methods": Ignored("values", "all methods are allowed where the origin is", ('["*"]', "*")),
    "--allowed-headers": Ignored("values", "all headers are allowed where the origin is", ('["*"]', "*")),
    "--max-cpu-loras": Ignored("a value", "adapters are read when they are loaded"),
    "--lora-dtype": Ignored("a value", "adapters have the model's dtype", ("auto",)),
    "--fully-sharded-loras": Ignored("nothing", "adapters are sharded as their kernels are"),
    "--collect-detailed-traces": Ignored("a value", "one span is made for each request"),
    "--show-hidden-metrics-for-version": Ignored("a value", "no metrics are hidden"),
}

_CHANGE_CONFIG = "the checkpoint's config.json says it: change it there"
_PLUGIN = "parsers are entry points: install a package with one (docs/write-a-parser.md)"

REFUSED: Mapping[str, Refused] = {
    "--trust-remote-code": Refused(
        "code from checkpoints is never run here: install the plugin of the model type, or see ttpu-any"
    ),
    "--hf-overrides": Refused(_CHANGE_CONFIG),
    "--rope-scaling": Refused(_CHANGE_CONFIG),
    "--rope-theta": Refused(_CHANGE_CONFIG),
    "--override-generation-config": Refused("the checkpoint's generation_config.json says it: change it there"),
    "--hf-config-path": Refused("the checkpoint's own config.json is read: put it there"),
    "--hf-token": Refused("the variable HF_TOKEN is read: set it"),
    "--tokenizer-revision": Refused("the tokenizer has the checkpoint's revision: name another by --tokenizer"),
    "--download-dir": Refused("the Hub's own cache is used: set HF_HOME"),
    "--tool-parser-plugin": Refused(_PLUGIN),
    "--reasoning-parser-plugin": Refused(_PLUGIN),
    "--middleware": Refused("no code is loaded by name: put a proxy before the server"),
    "--logits-processors": Refused("no code is loaded by name: use logit_bias or guided decoding"),
    "--logits-processor-pattern": Refused("requests run no code: use logit_bias or guided decoding"),
    "--trust-request-chat-template": Refused("templates of clients are not run: pass --chat-template"),
    "--return-tokens-as-token-ids": Refused("requests ask for it with return_tokens_as_token_ids: pass it there"),
    "--enable-force-include-usage": Refused("requests ask for it with stream_options: pass it there"),
    "--allow-credentials": Refused("keys are sent in headers, not in cookies: leave it out"),
    "--num-gpu-blocks-override": Refused("pages fill the memory that is given: use --kv-cache-memory"),
    "--kv-transfer-config": Refused("caches are not moved between servers: leave it out"),
    "--enable-eplb": Refused("experts are not moved between devices: leave it out"),
    "--headless": Refused("`ttpu launch` starts several processes: see docs/launch.md"),
    "--disable-sliding-window": Refused("windows are served as the checkpoint has them: use --max-model-len"),
    "--calculate-kv-scales": Refused("scales of the cache are not computed: leave it out"),
    "--enable-prompt-embeds": Refused("prompts are text or token ids: leave it out"),
    "--enable-lora-bias": Refused("biases of adapters are not served: leave it out"),
    "--ssl-ca-certs": Refused("clients are known by keys, not by certificates: put a proxy before the server"),
    "--ssl-cert-reqs": Refused("clients are known by keys, not by certificates: put a proxy before the server"),
    "--enable-ssl-refresh": Refused("certificates are read once: start the server again"),
    "--ssl-ciphers": Refused("the ciphers are Python's: put a proxy before the server"),
}
