"""build_decoder: a ModelConfig in, the tensor program of one forward step out.

The same program serves prefill (num_tokens tokens at once), decode (one) and decode of a batch of
sequences (one each), for every family of config.py. Weight names and shapes are those of
weights/tensors.py. Next on the walk: sharding/planner.py.
"""

from typing import Literal, Protocol

from distmega.errors import RequestError, counted
from distmega.models.config import ModelConfig
from distmega.models.sampling import GREEDY, Method
from distmega.models.weights.tensors import weight_specs
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program

Logits = Literal["none", "last", "all"]


class OtherDecoder(Protocol):
    """A decoder that others build, as torch_import/huggingface/decoders.py does of classes
    of transformers.

    group: query heads per kv head. recurrent_states: states that each token changes, so that those
    of a sequence come one by one, none twice.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def recurrent_states(self) -> tuple[str, ...]: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def build(
        self,
        num_tokens: int,
        max_context: int,
        *,
        batch: int = 1,
        logits: Logits = "none",
        dtype: str = "f32",
        method: Method = GREEDY,
        prompt: bool = False,
        peaks: bool = False,
    ) -> Program:
        """As build_decoder."""
        ...


AnyDecoder = ModelConfig | OtherDecoder
"""What a model's programs are built of."""

PEAKS = "next.value"
"""An output of programs that are asked for it; see build_decoder."""


def build_decoder(
    config: AnyDecoder,
    num_tokens: int,
    max_context: int,
    *,
    batch: int = 1,
    logits: Logits = "none",
    dtype: str = "f32",
    method: Method = GREEDY,
    prompt: bool = False,
    peaks: bool = False,
) -> Program:
    """The program that appends num_tokens tokens to caches of max_context positions and predicts
    the next.

    Inputs `tokens` and `positions`, i64 [m]; where `method` samples, also `sampling`, f32 [r, n],
    and `seeds`, i64 [r]: Sampling.settings and .seed_of. Outputs: `logits`, of all tokens or the
    last, unless "none"; and `next`, i64 [r], the token after the last one; r is 1. batch > 1: one
    token of each of so many sequences, which have caches of their own, [batch, h, t, d]; m, r and
    the rows of logits are the sequences.

    prompt: the m tokens are those of `batch` sequences, one sequence's behind another's, and may be
    any part of each. More inputs: `sequences`, i64 [m], of each token; `starts`, i64 [batch + 1],
    where each sequence's rows begin and the last one's end; `last`, i64 [batch], the row after
    which a sequence's next token comes, r is the batch; and where `method` samples
    `last_positions`, i64 [batch], the positions of these rows. peaks: one more output, PEAKS [r],
    the value for which each token was chosen, which is NaN or infinite where the logits are.
    RequestError when the context does not fit the model.
    """
    if not isinstance(config, ModelConfig):
        return config.build(
            num_tokens, max_context, batch=batch, logits=logits, dtype=dtype, method=method,
            prompt=prompt, peaks=peaks,
        )  # fmt: skip
    if batch < 1 or (batch > 1 and num_tokens > 1 and not prompt):
        raise RequestError(
            f"{counted(num_tokens, 'token')} of each of {counted(batch, 'sequence')}",
            expected="at least one sequence, and one token of each where there are several",
            remedy="build the program of a prompt",
        )
    most = max_context * batch if prompt else max_context
    if not 1 <= num_tokens <= most or max_context > config.max_positions:
        found = f"{counted(num_tokens, 'token')} in a context of {max_context}"
        expected = (
            f"1 <= tokens <= context <= {config.max_positions}, what the model was trained for"
        )
        raise RequestError(found, expected=expected, remedy="choose a shorter prompt or context")
    decoder = _Decoder(config, num_tokens, max_context, batch, dtype, prompt)
    return decoder.build(logits, method, peaks)


def layer_starts(config: AnyDecoder) -> tuple[str, ...]:
    """The first op of each layer but the first, where a pipeline is best cut; none if unknown."""
    if not isinstance(config, ModelConfig):
        return ()
    return tuple(f"layers.{layer}.attn_in" for layer in range(1, config.num_layers))


def choose_tokens(
    p: ProgramBuilder, scores: Handle, method: Method, positions: Handle | None
) -> Handle:
    """The next token of each row of logits [r, v], [r]; declares the inputs that `method` takes.
    positions: of the rows, [r]; by default input `last_positions`.
    """
    rows, vocab = scores.shape
    if not method.samples:
        return p.argmax(scores, name="next")
    at = p.input("last_positions", (rows,), "i64") if positions is None else positions
    limited = method.kind == "limited"
    limits = p.input("sampling", (rows, 3 if limited else 2), "f32")
    if limited:
        num = method.num_candidates
        candidates = p.top(scores, num, name="candidates") if 0 < num < vocab else scores
        limits = p.cutoff(candidates, limits, name="limits")
    seeds = p.input("seeds", (rows,), "i64")
    return p.sample(scores, limits, seeds, at, name="next")


class _Decoder:
    """The builder with what every layer needs at hand."""

    def __init__(
        self,
        config: ModelConfig,
        num_tokens: int,
        max_context: int,
        batch: int,
        dtype: str,
        prompt: bool,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.batch = batch
        self.num_rows = num_tokens if prompt else num_tokens * batch
        self.specs = weight_specs(config)
        self.p = ProgramBuilder(f"decoder_{num_tokens}" + (f"x{batch}" if batch > 1 else ""))
        self.positions = self.p.input("positions", (self.num_rows,), "i64")
        self.sequences: Handle | None = None
        self.packed: tuple[Handle, Handle] | None = None
        self.last: Handle | None = None
        if prompt:
            self.sequences = self.p.input("sequences", (self.num_rows,), "i64")
            self.packed = self.sequences, self.p.input("starts", (batch + 1,), "i64")
            self.last = self.p.input("last", (batch,), "i64")
        self.rope_table = self.p.weight("rope_table", (max_context, config.head_dim), "f32")
        caches = (batch,) if batch > 1 else ()
        self.cache_shape = (*caches, config.num_kv_heads, max_context, config.head_dim)

    def build(self, logits: Logits, method: Method, peaks: bool) -> Program:
        """Embedding, layers, head, in this order."""
        tokens = self.p.input("tokens", (self.num_rows,), "i64")
        embed = self.weight("embed")
        x = self.p.embedding(tokens, embed, name="embedded")
        for layer in range(self.config.num_layers):
            x = self.attention_block(layer, x)
            sparse = self.config.has_experts(layer)
            x = self.expert_block(layer, x) if sparse else self.ffn_block(layer, x)
        if logits != "all":
            x = self.last_row(x, "last_hidden")
        x = self.p.rms_norm(x, self.weight("norm"), self.config.norm_eps, name="normed")
        head = embed if self.config.tied else self.weight("head")
        scores = self.p.linear(x, head, spec="m k, v k -> m v", name="logits")
        last = self.last_row(scores, "last_logits") if logits == "all" else scores
        chosen = self.choose(last, method)
        outputs = [chosen] if logits == "none" else [scores, chosen]
        return self.p.build(*outputs, *([self.p.value_of(chosen)] if peaks else []))

    def choose(self, scores: Handle, method: Method) -> Handle:
        """The next token of each row of logits, [rows]."""
        at = self.last_row(self.positions, "last_position") if self.last is None else None
        return choose_tokens(self.p, scores, method, at)

    def attention_block(self, layer: int, x: Handle) -> Handle:
        """x + attention(norm(x)), with the new keys and values appended to the layer's caches
        first.
        """
        p, config, at = self.p, self.config, f"layers.{layer}"
        normed = p.rms_norm(
            x, self.weight(f"{at}.attn_norm"), config.norm_eps, name=f"{at}.attn_in"
        )
        q = self.rotated(at, "q", self.project(at, "q", normed, "h g d"))
        k = self.rotated(at, "k", self.project(at, "k", normed, "h d"))
        v = self.project(at, "v", normed, "h d")
        k_cache = p.state(f"{at}.k_cache", self.cache_shape, self.dtype)
        v_cache = p.state(f"{at}.v_cache", self.cache_shape, self.dtype)
        own = self.sequences if self.batch > 1 else None
        p.kv_append(k_cache, k, self.positions, own, name=f"{at}.k_append")
        p.kv_append(v_cache, v, self.positions, own, name=f"{at}.v_append")
        scale, window = config.head_dim**-0.5, config.window(layer)
        mixed = p.attention(
            q,
            k_cache,
            v_cache,
            self.positions,
            scale,
            window,
            packed=self.packed,
            name=f"{at}.attention",
        )
        has_bias = config.out_bias
        out = self.product(f"{at}.attn_out", mixed, f"{at}.wo", "m h g d, n h g d", has_bias)
        return p.pointwise("a0 + a1", x, out, name=f"{at}.attn_sum")

    def ffn_block(self, layer: int, x: Handle) -> Handle:
        """x + down(silu(gate(norm(x))) * up(norm(x)))."""
        p, at = self.p, f"layers.{layer}"
        ffn_norm = self.weight(f"{at}.ffn_norm")
        normed = p.rms_norm(x, ffn_norm, self.config.norm_eps, name=f"{at}.ffn_in")
        has_bias = self.config.ffn_bias
        gate = self.product(f"{at}.gate", normed, f"{at}.w_gate", "m k, f k", has_bias)
        up = self.product(f"{at}.up", normed, f"{at}.w_up", "m k, f k", has_bias)
        mixed = p.pointwise("silu(a0) * a1", gate, up, name=f"{at}.ffn_mixed")
        out = self.product(f"{at}.ffn_out", mixed, f"{at}.w_down", "m f, k f", has_bias)
        return p.pointwise("a0 + a1", x, out, name=f"{at}.ffn_sum")

    def expert_block(self, layer: int, x: Handle) -> Handle:
        """x + the experts of norm(x): each token's, weighted by the router, and the shared one."""
        p, config, at = self.p, self.config, f"layers.{layer}"
        ffn_norm = self.weight(f"{at}.ffn_norm")
        normed = p.rms_norm(x, ffn_norm, config.norm_eps, name=f"{at}.ffn_in")
        router = self.weight(f"{at}.router")
        scores = p.linear(normed, router, spec="m k, e k -> m e", name=f"{at}.scores")
        weights, chosen = p.top_k(
            scores,
            config.experts_per_token,
            "softmax_chosen" if config.norm_top else "softmax",
            name=f"{at}.chosen",
        )
        routing = p.route(chosen, config.num_experts, name=f"{at}.routing")
        rows = p.gather_rows(normed, routing, name=f"{at}.gathered")
        gate, up = (
            p.grouped_linear(
                rows, self.weight(f"{at}.expert_{part}"), routing, name=f"{at}.expert_{part}s"
            )
            for part in ("gate", "up")
        )
        mixed = p.grouped_pointwise(
            "silu(a0) * a1", gate, up, routing=routing, name=f"{at}.expert_mixed"
        )
        down = p.grouped_linear(
            mixed, self.weight(f"{at}.expert_down"), routing, name=f"{at}.expert_out"
        )
        out = p.scatter_add(down, weights, routing, name=f"{at}.experts")
        if config.shared_ffn:
            shared = self.shared_expert(at, normed)
            out = p.pointwise("a0 + a1", out, shared, name=f"{at}.all_experts")
        return p.pointwise("a0 + a1", x, out, name=f"{at}.ffn_sum")

    def shared_expert(self, at: str, x: Handle) -> Handle:
        """down(sigmoid(router(x)) * silu(gate(x)) * up(x)): the factor stands before the product,
        so that ranks that share the sum out need not know it.
        """
        p = self.p
        opened = p.linear(
            x, self.weight(f"{at}.shared_router"), spec="m k, o k -> m o", name=f"{at}.shared_open"
        )
        gate, up = (
            p.linear(
                x,
                self.weight(f"{at}.shared_{part}"),
                spec="m k, s k -> m s",
                name=f"{at}.shared_{part}s",
            )
            for part in ("gate", "up")
        )
        mixed = p.pointwise(
            "sigmoid(a2) * silu(a0) * a1", gate, up, opened, name=f"{at}.shared_mixed"
        )
        down = self.weight(f"{at}.shared_down")
        return p.linear(mixed, down, spec="m s, k s -> m k", name=f"{at}.shared_out")

    def project(self, at: str, letter: str, x: Handle, heads: str) -> Handle:
        """Queries, keys or values of x: [m, heads], with a bias in the families that have one."""
        spec, has_bias = f"m k, {heads} k", self.config.qkv_bias
        return self.product(f"{at}.{letter}", x, f"{at}.w{letter}", spec, has_bias)

    def product(self, name: str, x: Handle, weight: str, spec: str, has_bias: bool) -> Handle:
        """x times a weight whose axes stand behind the comma of `spec`, plus its bias: b instead of
        w. Axes of x that the weight lacks come first in the result, then the weight's own.
        """
        of_x, of_weight = (group.split() for group in spec.split(","))
        rows = [axis for axis in of_x if axis not in of_weight]
        columns = [axis for axis in of_weight if axis not in of_x]
        result = f"-> {' '.join(rows)} {' '.join(columns)}"
        if not has_bias:
            return self.p.linear(x, self.weight(weight), spec=f"{spec} {result}", name=name)
        at, _, kind = weight.rpartition(".")
        bias = self.weight(f"{at}.b{kind.removeprefix('w')}")
        spec = f"{spec}, {' '.join(columns)} {result}"
        return self.p.linear(x, self.weight(weight), bias, spec=spec, name=name)

    def rotated(self, at: str, letter: str, x: Handle) -> Handle:
        """Rotary embedding of queries or keys, after their norm in the families that have one."""
        if self.config.qk_norm:
            weight, shape = self.weight(f"{at}.{letter}_norm"), x.shape
            if self.config.qk_norm_whole:
                x = self.p.reshape(x, (shape[0], *weight.shape), name=f"{at}.{letter}_joined")
            x = self.p.rms_norm(x, weight, self.config.norm_eps, name=f"{at}.{letter}_normed")
            if self.config.qk_norm_whole:
                x = self.p.reshape(x, shape, name=f"{at}.{letter}_heads")
        return self.p.rope(x, self.positions, self.rope_table, name=f"{at}.{letter}_rotated")

    def last_row(self, x: Handle, name: str) -> Handle:
        """The last token's row of each sequence, [batch, ...]."""
        rows = x.shape[0]
        if self.last is not None:
            return self.p.embedding(self.last, x, name=name)
        return x if rows == self.batch else self.p.slice(x, 0, rows - 1, rows, name=name)

    def weight(self, name: str) -> Handle:
        """Declares a weight in the shape that weights/tensors.py gives it."""
        return self.p.weight(name, self.specs[name].shape, self.dtype)
