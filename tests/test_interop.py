"""Published ``config.json`` and weights, in and out: against the zoo, and against layers in NumPy that read tensors by
the names they were published under."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx
from flax.core import spmd

import mok_jax.linen
from mok_jax import interop, sharding
from mok_jax.interop import files, layouts, weights
from mok_jax.layer import Settings
from mok_jax.nnx import MoE
from mok_jax.zoo import LAYERS
from support.compare import relative_l2
from support.hf_checkpoints import BF16, EXPERTS, HIDDEN, LAYER, MODELS

BFLOAT16 = {"param_dtype": jnp.bfloat16}

# ---- config.json.


def text(model_type, **fields):
    return {"model_type": model_type, "hidden_act": "silu", **fields}


DEEPSEEK = {"moe_layer_freq": 1, "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True}
DEEPSEEK |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
DEEPSEEK_V2 = DEEPSEEK | {"num_experts_per_tok": 6, "n_shared_experts": 2, "norm_topk_prob": False}
DEEPSEEK_V2 |= {"scoring_func": "softmax"}
DEEPSEEK_V4 = {"num_experts_per_tok": 6, "n_shared_experts": 1, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus"}
DEEPSEEK_V4 |= {"topk_method": "noaux_tc", "swiglu_limit": 10.0, "num_hash_layers": 3}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4, "experts_per_token": 4}
GPT_OSS |= {"swiglu_limit": 7.0}
QWEN3 = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
KIMI_K2 = text(
    "kimi_k2",
    hidden_size=7168,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    routed_scaling_factor=2.827,
    **DEEPSEEK,
)

# What the published config.json of each model says of its sparse layers.
CONFIGS = {
    "kimi-k2": KIMI_K2,
    "deepseek-v2": text("deepseek_v2", hidden_size=5120, moe_intermediate_size=1536, n_routed_experts=160)
    | DEEPSEEK_V2
    | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    "deepseek-v2-lite": text("deepseek_v2", hidden_size=2048, moe_intermediate_size=1408, n_routed_experts=64)
    | DEEPSEEK_V2
    | {"topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek-v3": text("deepseek_v3", hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=256)
    | DEEPSEEK
    | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    "deepseek-v4-flash": text("deepseek_v4", hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=256)
    | DEEPSEEK_V4
    | {"routed_scaling_factor": 1.5},
    "deepseek-v4-pro": text("deepseek_v4", hidden_size=7168, moe_intermediate_size=3072, n_routed_experts=384)
    | DEEPSEEK_V4
    | {"routed_scaling_factor": 2.5},
    "ernie-4.5-21b-a3b": text(
        "ernie4_5_moe",
        hidden_size=2560,
        moe_intermediate_size=1536,
        moe_num_experts=64,
        moe_k=6,
        moe_num_shared_experts=2,
        use_bias=False,
    ),
    "glm-4.5-air": text("glm4_moe", hidden_size=4096, moe_intermediate_size=1408, n_routed_experts=128)
    | DEEPSEEK
    | {"routed_scaling_factor": 1.0},
    "glm-4.7": text("glm4_moe", hidden_size=5120, moe_intermediate_size=1536, n_routed_experts=160)
    | DEEPSEEK
    | {"routed_scaling_factor": 2.5},
    "glm-5.2": text("glm_moe_dsa", hidden_size=6144, moe_intermediate_size=2048, n_routed_experts=256)
    | DEEPSEEK
    | {"routed_scaling_factor": 2.5},
    "gpt-oss-20b": text("gpt_oss", num_local_experts=32, **GPT_OSS),
    "gpt-oss-120b": text("gpt_oss", num_local_experts=128, **GPT_OSS),
    "llama-4-scout": {
        "model_type": "llama4",
        "text_config": text(
            "llama4_text", hidden_size=5120, intermediate_size=8192, num_local_experts=16, num_experts_per_tok=1
        ),
    },
    "mixtral-8x7b": text(
        "mixtral", hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2
    ),
    "olmoe-1b-7b": text(
        "olmoe",
        hidden_size=2048,
        intermediate_size=1024,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "qwen2-57b-a14b": text(
        "qwen2_moe",
        hidden_size=3584,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "qwen3-30b-a3b": text("qwen3_moe", hidden_size=2048, moe_intermediate_size=768, **QWEN3),
    "qwen3-235b-a22b": text("qwen3_moe", hidden_size=4096, moe_intermediate_size=1536, **QWEN3),
    "qwen3.5-397b-a17b": {
        "model_type": "qwen3_5_moe",
        "text_config": text(
            "qwen3_5_moe_text",
            hidden_size=4096,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
            num_experts=512,
            num_experts_per_tok=10,
        ),
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_published_configurations(name):
    arguments = interop.arguments(CONFIGS[name])
    assert arguments == LAYERS[name].arguments()
    assert {key: type(value) for key, value in arguments.items()} == {
        key: type(value) for key, value in LAYERS[name].arguments().items()
    }


def test_written_by_newer_transformers():
    config = dict(CONFIGS["qwen3-30b-a3b"])
    config["num_local_experts"] = config.pop("num_experts")
    assert interop.arguments(config) == LAYERS["qwen3-30b-a3b"].arguments()


def test_models_that_also_see():
    """Kimi K2.5's language model is K2."""
    for inner in KIMI_K2, KIMI_K2 | {"model_type": "deepseek_v3"}:
        config = {"model_type": "kimi_k25", "text_config": inner}
        assert interop.arguments(config) == LAYERS["kimi-k2"].arguments()


# A model, what its config.json says instead (REMOVED: nothing), and words of the refusal.
REMOVED = object()
REFUSED = [
    ("mixtral-8x7b", {"model_type": "gpt2"}, "model_type is 'gpt2'; it must be one of deepseek_v2, "),
    ("mixtral-8x7b", {"model_type": REMOVED}, "model_type is None"),
    ("mixtral-8x7b", {"num_local_experts": REMOVED}, "no 'num_local_experts', which a model of type 'mixtral'"),
    ("mixtral-8x7b", {"num_local_experts": 8.0}, "num_local_experts is 8.0; it must be a whole number of at least 1"),
    ("mixtral-8x7b", {"hidden_size": 0}, "hidden_size is 0; .* at least 1"),
    ("mixtral-8x7b", {"hidden_size": True}, "hidden_size is True"),
    ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; .* at most num_local_experts, which is 8"),
    ("mixtral-8x7b", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
    ("qwen3.5-397b-a17b", {"text_config": REMOVED}, "no 'text_config'"),
    ("qwen3-30b-a3b", {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be True or False"),
    ("qwen3-30b-a3b", {"num_local_experts": 64}, "num_local_experts is 64, but num_experts is 128"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is True; it must be False"),
    ("deepseek-v2", {"topk_method": "greedy"}, "n_group is 8; it must be 1 or None"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, "it must be 'greedy' or 'group_limited_greedy'"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be 'sigmoid'"),
    ("deepseek-v3", {"n_group": 7}, "n_group is 7; it must divide n_routed_experts, which is 256"),
    ("deepseek-v3", {"topk_group": 9}, "topk_group is 9; it must be from 1.* to n_group, which is 8"),
    ("deepseek-v3", {"n_group": 128, "topk_group": 3}, "topk_group is 3; it must be from 4"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; it must be 1"),
    ("deepseek-v3", {"routed_scaling_factor": "2.5"}, "routed_scaling_factor is '2.5'; it must be a positive number"),
    ("deepseek-v4-pro", {"scoring_func": "relu"}, "it must be 'sqrtsoftplus' or 'softmax' or 'sigmoid'"),
    ("deepseek-v4-pro", {"swiglu_limit": None}, "swiglu_limit is None"),
    ("ernie-4.5-21b-a3b", {"use_bias": True}, "use_bias is True; it must be False"),
    ("ernie-4.5-21b-a3b", {"moe_num_experts": [64, 64]}, "moe_num_experts is \\[64, 64\\]"),
    ("gpt-oss-20b", {"experts_per_token": 8}, "experts_per_token is 8, but num_experts_per_tok is 4"),
    ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0; it must be 1.702"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_refused_configurations(name, change, words):
    config = {key: value for key, value in (CONFIGS[name] | change).items() if value is not REMOVED}
    with pytest.raises(ValueError, match=words):
        interop.arguments(config)


# ---- Weights.


@functools.cache
def tensors_of(name):
    return MODELS[name].tensors()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a model's checkpoint, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def folder(name):
        MODELS[name].write(root / name, tensors_of(name))
        return root / name

    return folder


def read(folder):
    """All tensors in a folder, by name."""
    names = files.files_of(folder)
    tensors = {}
    for file in sorted(set(names.values())):
        with safetensors.safe_open(folder / file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert tensors.keys() == names.keys()
    return tensors


def assert_same(actual, expected):
    """Names, dtypes, shapes and bytes."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert np.asarray(actual[name]).tobytes() == np.asarray(array).tobytes(), name


def test_every_layout_has_a_checkpoint():
    """And every kind of model a layout."""
    types = {interop.config.text_config(model.config)[0] for model in MODELS.values()}
    of_models = {id(layout) for name in types for layout in layouts.LAYOUTS[name]}
    assert {id(layout) for those in layouts.LAYOUTS.values() for layout in those} == of_models
    assert {interop.config.text_model_type(name) for name in interop.MODEL_TYPES} == set(layouts.LAYOUTS)


@pytest.mark.parametrize("name", MODELS)
def test_forward_against_numpy(name, folder_of):
    """The layer that config.json describes, with the weights that the files hold, computes what the model does."""
    x = np.random.default_rng(1).normal(size=(16, HIDDEN)).astype(np.float32)
    arguments = interop.arguments_of(folder_of(name))
    layer = nnx.eval_shape(lambda: MoE(**arguments, implementation="reference", rngs=nnx.Rngs(0)))
    interop.assign(layer, interop.load_layer(folder_of(name), LAYER, layer))
    want = MODELS[name].forward(tensors_of(name), x)
    assert relative_l2(layer(jnp.asarray(x)).output, want) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, folder_of, tmp_path):
    """Loaded and saved, the bytes are the same; MXFP4 and experts of a second layout come out in the first."""
    arguments = interop.arguments_of(folder_of(name)) | BFLOAT16
    parameters = interop.load_layer(folder_of(name), LAYER, arguments)
    assert all(array.dtype == (jnp.float32 if name == "expert_bias" else BF16) for name, array in parameters.items())
    model_type = MODELS[name].config["model_type"]
    interop.save_layer(tmp_path, LAYER, arguments, parameters, model_type=model_type)
    if "," not in name:
        assert_same(read(tmp_path), tensors_of(name))
    assert_same(interop.load_layer(tmp_path, LAYER, arguments, model_type=model_type), parameters)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_several_files(name, folder_of, tmp_path):
    """Read in whatever files tensors are; written into as many as their size asks for, layer after layer."""
    arguments = interop.arguments_of(folder_of(name)) | BFLOAT16
    parameters = interop.load_layer(folder_of(name), LAYER)
    MODELS[name].write(tmp_path / "in", tensors_of(name), files=3)
    assert_same(interop.load_layer(tmp_path / "in", LAYER), parameters)
    limit = 20_000
    out = tmp_path / "out"
    for number in (LAYER, LAYER + 1):
        interop.save_layer(
            out, number, arguments, parameters, model_type=name, dtype=jnp.bfloat16, max_file_bytes=limit
        )
    written = sorted(path.name for path in out.iterdir())
    assert written[0].startswith(f"model-layer-{LAYER:05d}-00001-of-0000") and len(written) > 5
    for file in written[:-1]:
        with safetensors.safe_open(out / file, framework="numpy") as opened:
            sizes = [opened.get_tensor(tensor).nbytes for tensor in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= limit or len(sizes) == 1
    there = read(out)
    second = {tensor.replace(f".{LAYER}.", f".{LAYER + 1}.", 1): array for tensor, array in tensors_of(name).items()}
    assert_same(there, tensors_of(name) | second)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in there.values())


def mesh_of(ranks, groups=1):
    return sharding.make_mesh(expert_parallelism=ranks, devices=jax.devices()[: ranks * groups], domain_size=ranks)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_5_moe", "ernie4_5_moe", "gpt_oss", "gpt_oss, MXFP4"])
def test_on_a_mesh(name, folder_of, tmp_path):
    """Six experts on four ranks, in two copies: two of padding, each device with its own, and saved without."""
    mesh, arguments = mesh_of(4, groups=2), interop.arguments_of(folder_of(name)) | BFLOAT16
    alone = interop.load_layer(folder_of(name), LAYER, arguments)
    spread = interop.load_layer(folder_of(name), LAYER, arguments, mesh=mesh)
    settings = Settings(**arguments, mesh=mesh)
    for parameter, (shape, axes, _) in settings.parameters().items():
        along = jax.sharding.NamedSharding(mesh, settings.partition_spec(axes))
        assert spread[parameter].sharding.is_equivalent_to(along, len(shape)) and spread[parameter].shape == shape
        padding = [(0, size - true) for size, true in zip(shape, alone[parameter].shape, strict=True)]
        np.testing.assert_array_equal(spread[parameter], np.pad(alone[parameter], padding))
    assert spread["wi_0"].shape[0] == 8 and {s.data.shape[0] for s in spread["wi_0"].addressable_shards} == {2}
    model_type = MODELS[name].config["model_type"]
    for folder, layer in (("with", settings), ("without", arguments)):
        interop.save_layer(tmp_path / folder, LAYER, layer, spread, model_type=model_type)
        assert_same(interop.load_layer(tmp_path / folder, LAYER, arguments, model_type=model_type), alone)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_moe", "gpt_oss", "gpt_oss, MXFP4"])
def test_reads_no_more_than_a_device_holds(name, folder_of, monkeypatch):
    """Also where rules split the other dimensions: what is read at once is one expert's part on one device."""
    read_part, parts = weights.read_part, []

    def recorded(*arguments):
        part = read_part(*arguments)
        parts.append((arguments[3], part.size))
        return part

    monkeypatch.setattr(weights, "read_part", recorded)
    mesh, arguments = mesh_of(2, groups=2), interop.arguments_of(folder_of(name))
    with spmd.logical_axis_rules((("embed", "data"),)):
        spread = interop.load_layer(folder_of(name), LAYER, arguments, mesh=mesh)
    largest = {parameter: max(size for of, size in parts if of == parameter) for parameter in spread}
    for parameter in ("wi_0", "wo"):
        assert {shard.data.shape[0] for shard in spread[parameter].addressable_shards} == {EXPERTS // 2}
        assert largest[parameter] == spread[parameter][0].size // 2
        assert sum(size for of, size in parts if of == parameter) == spread[parameter].size
    assert largest["gate"] == spread["gate"].size // 2
    for parameter, array in interop.load_layer(folder_of(name), LAYER, arguments).items():
        np.testing.assert_array_equal(spread[parameter], array)


def test_forward_on_a_mesh(folder_of):
    x = np.random.default_rng(1).normal(size=(16, HIDDEN)).astype(np.float32)
    arguments = interop.arguments_of(folder_of("mixtral")) | {"mesh": mesh_of(4), "implementation": "reference"}
    layer = nnx.eval_shape(lambda: MoE(**arguments, rngs=nnx.Rngs(0)))
    interop.assign(layer, interop.load_layer(folder_of("mixtral"), LAYER, layer))
    out = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x))
    assert relative_l2(out.output, MODELS["mixtral"].forward(tensors_of("mixtral"), x)) < 1e-5


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_both_kinds_of_layers_take_them(name, folder_of, tmp_path):
    """And give them back: a Linen layer's variables, boxed or not, and an NNX layer."""
    arguments = interop.arguments_of(folder_of(name))
    parameters = interop.load_layer(folder_of(name), LAYER)
    linen = mok_jax.linen.MoE(**arguments, implementation="reference")
    variables = interop.linen_variables(parameters)
    boxed = jax.eval_shape(linen.init, jax.random.key(0), jnp.ones((1, HIDDEN)))
    shapes = {key: value.shape for key, value in interop.parameters_of(boxed).items()}
    assert shapes == {key: value.shape for key, value in parameters.items()}
    assert_same(interop.parameters_of(variables), parameters)
    layer = nnx.eval_shape(lambda: MoE(**arguments, implementation="reference", rngs=nnx.Rngs(0)))
    interop.assign(layer, parameters)
    assert_same(interop.parameters_of(layer), parameters)
    interop.save_layer(tmp_path, 0, layer, model_type=name, dtype=jnp.bfloat16)
    assert_same(interop.load_layer(tmp_path, 0, linen, model_type=name), parameters)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, HIDDEN)).astype(np.float32))
    np.testing.assert_array_equal(linen.apply(variables, x).output, layer(x).output)


def test_hash_routed_layers(tmp_path):
    """Their table is left to who calls them, and they have no selection bias."""
    model = MODELS["deepseek_v4"]
    tensors = {name: array for name, array in model.tensors().items() if not name.endswith("gate.bias")}
    table = {f"layers.{LAYER}.ffn.gate.tid2eid": np.zeros((9, 2), np.int64)}
    model.write(tmp_path, tensors | table)
    arguments = interop.arguments_of(tmp_path)
    parameters = interop.load_layer(tmp_path, LAYER, arguments | {"expert_bias": False})
    assert "expert_bias" not in parameters and parameters["wi_0"].shape[0] == EXPERTS
    with pytest.raises(ValueError, match=f"no layers.{LAYER}.ffn.gate.bias"):
        interop.load_layer(tmp_path, LAYER, arguments)


def test_numbers_of_mxfp4():
    """All sixteen, at the scales that bf16's exponents reach."""
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.array([0, 1, 2, 100, 126, 127, 128, 129, 200, 250, 251, 252, 127, 127, 127, 127], np.uint8)
    got = interop.mxfp4.dequantize(blocks, scales[:, None])
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for row in range(16):
        want = np.stack([values, np.full(16, values[row])], axis=1).reshape(-1) * 2.0 ** (int(scales[row]) - 127)
        np.testing.assert_array_equal(got[row], want)
        np.testing.assert_array_equal(got[row].astype(BF16).astype(np.float32), got[row])


# ---- Refusals.

MIXTRAL = f"model.layers.{LAYER}.block_sparse_moe."


def changed(**changes):
    """The tensors of the small Mixtral, some by other arrays, or none."""
    changes = {MIXTRAL + name.replace("__", "."): array for name, array in changes.items()}
    return {name: array for name, array in (tensors_of("mixtral") | changes).items() if array is not None}


BAD = [
    ({"experts__5__w3__weight": None}, f"has no {MIXTRAL}experts.5.w3.weight"),
    ({f"experts__{e}__w2__weight": None for e in range(4)}, f"{MIXTRAL}experts.0.w2.weight \\(and 3 more\\)"),
    ({"experts__6__w1__weight": np.zeros((4, 4), np.float32)}, f"has {MIXTRAL}experts.6.w1.weight, of which"),
    ({"gate__bias": np.zeros(6, np.float32)}, f"has {MIXTRAL}gate.bias, of which the layer has no parameter"),
    ({"gate__weight": np.zeros((64, 6), np.float32)}, f"{MIXTRAL}gate.weight has shape \\(64, 6\\); .* \\(6, 64\\)"),
    (
        {"gate__weight": None, "gate__packed": np.zeros(6, np.int32)},
        f"no {MIXTRAL}gate.weight, but {MIXTRAL}gate.packed",
    ),
    ({"gate__weight": np.zeros((6, 64), ml_dtypes.float8_e4m3fn)}, f"{MIXTRAL}gate.weight is F8_E4M3; it must be BF16"),
    ({"gate__weight": np.zeros((6, 64), np.int32)}, f"{MIXTRAL}gate.weight is I32; it must be BF16 or F16 or F32"),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_refused_tensors(changes, words, tmp_path):
    MODELS["mixtral"].write(tmp_path, changed(**changes))
    with pytest.raises(ValueError, match=words):
        interop.load_layer(tmp_path, LAYER)


def test_refused_folders(folder_of, tmp_path):
    folder = folder_of("mixtral")
    with pytest.raises(ValueError, match=r"no model.layers.0.block_sparse_moe.gate.weight .* experts are 3 to 3"):
        interop.load_layer(folder, 0)
    with pytest.raises(ValueError, match=r"no config.json"):
        interop.load_layer(tmp_path, 0)
    with pytest.raises(ValueError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        interop.load_layer(tmp_path, 0, interop.arguments_of(folder), model_type="mixtral")
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        interop.load_layer(folder, LAYER, model_type="gpt2")
    with pytest.raises(ValueError, match=r"layer has gate_bias, for which such checkpoints have no tensor"):
        interop.load_layer(folder, LAYER, interop.arguments_of(folder) | {"router_bias": True})
    abstract = mesh_of(2).abstract_mesh
    with pytest.raises(ValueError, match="AbstractMesh"):
        interop.load_layer(folder, LAYER, mesh=abstract)


def test_refused_index(tmp_path):
    MODELS["mixtral"].write(tmp_path, tensors_of("mixtral"), files=2)
    index = tmp_path / "model.safetensors.index.json"
    there = json.loads(index.read_text())
    name = f"{MIXTRAL}gate.weight"
    file, other = there["weight_map"][name], {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    for wrong, words in (((other - {file}).pop(), "which does not have it"), ("gone", "does not have")):
        index.write_text(json.dumps(there | {"weight_map": there["weight_map"] | {name: wrong}}))
        with pytest.raises(ValueError, match=f"{name} is in {wrong}, .*{words}"):
            interop.load_layer(tmp_path, LAYER)


def test_refused_mxfp4(folder_of):
    arguments = interop.arguments_of(folder_of("gpt_oss, MXFP4"))
    with pytest.raises(ValueError, match="wo is stored in runs of 32 values, which 40 does not have"):
        interop.load_layer(folder_of("gpt_oss, MXFP4"), LAYER, arguments | {"intermediate_size": 40})


def test_refused_saves(folder_of, tmp_path):
    folder = folder_of("mixtral")
    arguments, parameters = interop.arguments_of(folder), interop.load_layer(folder, LAYER)
    save = functools.partial(interop.save_layer, tmp_path, 0, arguments, model_type="mixtral")
    with pytest.raises(ValueError, match="parameters is None"):
        save()
    with pytest.raises(ValueError, match="has no wo, which the layer has"):
        save({name: array for name, array in parameters.items() if name != "wo"})
    with pytest.raises(ValueError, match="has gate_bias, which the layer does not have"):
        save(parameters | {"gate_bias": jnp.zeros(6)})
    with pytest.raises(ValueError, match=r"wo has shape \(5, 32, 64\); it must have shape \(6, 32, 64\)"):
        save(parameters | {"wo": parameters["wo"][:5]})
    with pytest.raises(TypeError, match="dtype is int8"):
        save(parameters, dtype=jnp.int8)
    with pytest.raises(ValueError, match=r"has a model.safetensors, beside which no index is read"):
        interop.save_layer(folder, 0, arguments, parameters)
    assert not list(tmp_path.iterdir())
    save(parameters)
    with pytest.raises(ValueError, match=r"has model.layers.0.block_sparse_moe.* already"):
        save(parameters)


def test_without_the_package(monkeypatch, folder_of):
    """What needs it says what to install; config.json does without."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    arguments = interop.arguments_of(folder_of("mixtral"))
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        interop.load_layer(folder_of("mixtral"), LAYER, arguments)
