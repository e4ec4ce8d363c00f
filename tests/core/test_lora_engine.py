"""LoRA adapters in an engine: how requests choose them, how many are loaded, and images under changed encoders."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from dashinfer_vlm_core import VLM, Engine, EngineConfig, LoRARequest, SamplingParams
from dashinfer_vlm_core.config import LoraModule
from dashinfer_vlm_core.decoders import LORA
from dashinfer_vlm_core.decoders.supervisor import Supervisor
from dashinfer_vlm_core.engine import select_decoder
from dashinfer_vlm_core.engine.loras import LoraManager
from dashinfer_vlm_core.errors import (
    CheckpointError,
    InvalidParameter,
    ModelNotFound,
    QueueFull,
    SetupError,
    UnsupportedParameter,
)
from dashinfer_vlm_core.kernels.devices import cuda_devices
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.protocol import OfflineRequest
from dashinfer_vlm_core.testing import EVERYTHING, Script, ScriptedDecoder, scripted_registry
from tests.core.test_engine import engine_threads
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora
from tests.tiny import write_qwen2_5_vl
from tests.waiting import HANG, auntil, until

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe it.<|im_end|>\n<|im_start|>assistant\n"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_cache_mib": 64, "media_workers": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_qwen2_5_vl(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """Return an adapter of the text model, and one that also changes the vision encoder, as folders."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "text": write_lora(folder / "text", base, ATTENTION),
        # The MLPs of text model and vision encoder have the same names, as in published adapters of Qwen2.5-VL.
        "both": write_lora(folder / "both", base, (*MLP, "qkv"), saved=("ln_q",), seed=2),
    }


@pytest.fixture(scope="module")
def engine(base, folders):
    with Engine(
        EngineConfig(model=str(base), lora={"both": str(folders["both"])}, limits={"max_loras": 2}, **OPTIONS)
    ) as engine:
        yield engine


def picture(color=(200, 30, 30)):
    image = Image.new("RGB", (126, 98), color)
    image.paste((20, 40, 220), (10, 20, 60, 70))
    return {"prompt": PROMPT, "multi_modal_data": {"image": image}}


def tokens(vlm, prompts, lora_request=None):
    outputs = vlm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora_request)
    for output in outputs:
        assert output.error is None
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.supports("lora", backend="torch-cpu", family="qwen2_5_vl")
def test_images_equal_merged_weights(engine, base, folders, tmp_path):
    vlm = VLM(engine=engine)
    chosen = [None, LoRARequest("text", 1, str(folders["text"])), LoRARequest("both")]
    found = tokens(vlm, [picture()] * 3, chosen)
    expected = [tokens(vlm, picture())]
    for name in ("text", "both"):
        with VLM(merge_lora(tmp_path / name, base, folders[name]), **OPTIONS) as merged:
            expected.append(tokens(merged, picture()))
    assert [found[:1], found[1:2], found[2:]] == expected
    assert len(set(map(tuple, found))) == 3


def test_embeddings_are_shared_unless_encoder_is_changed(engine, folders):
    vlm, text = VLM(engine=engine), LoRARequest("text", 1, str(folders["text"]))
    encoded = []
    for lora_request in (None, text, LoRARequest("both"), LoRARequest("both"), None):
        before = engine.stats().vision.encoded
        tokens(vlm, picture((1, 2, 3)), lora_request)
        encoded.append(engine.stats().vision.encoded - before)
    assert encoded == [1, 0, 1, 0, 0]


def test_media_uuid_is_not_found_under_another_encoder(engine):
    vlm, named = VLM(engine=engine), picture((9, 9, 9)) | {"multi_modal_uuids": {"image": "red"}}
    again = {"prompt": PROMPT, "multi_modal_uuids": {"image": "red"}}
    assert tokens(vlm, named) == tokens(vlm, again)
    with pytest.raises(InvalidParameter, match="is not cached"):
        vlm.generate(again, GREEDY, use_tqdm=False, lora_request=LoRARequest("both"))
    assert tokens(vlm, named, LoRARequest("both")) == tokens(vlm, again, LoRARequest("both"))


def test_requests_name_lora_as_model(engine):
    vlm = VLM(engine=engine)
    request = HELLO | {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    by_model = {name: engine.chat({**request, "model": name}) for name in ("base", "both")}
    assert {name: completion.model for name, completion in by_model.items()} == {"base": "base", "both": "both"}
    texts = {name: completion.choices[0].message.content for name, completion in by_model.items()}
    (output,) = vlm.chat(HELLO["messages"], GREEDY, use_tqdm=False, lora_request=LoRARequest("both"))
    assert output.lora_request == LoRARequest("both")
    assert output.outputs[0].text == texts["both"] != texts["base"]
    assert [(lora.name, lora.source) for lora in engine.status().loras] == [("both", "both")]


def test_unknown_name_is_not_found(engine, folders):
    VLM(engine=engine).generate("a", GREEDY, use_tqdm=False, lora_request=LoRARequest("text", 1, str(folders["text"])))
    for name in ("other", "text"):  # clients can only name what the operator configured
        with pytest.raises(ModelNotFound, match=f"'{name}' is not served here. Use 'base' or 'both'"):
            engine.chat(HELLO | {"model": name})


def test_lora_requests_that_contradict_loaded_ones(engine, folders):
    vlm = VLM(engine=engine)

    def message(lora_request, kind=InvalidParameter):
        with pytest.raises(kind) as error:
            vlm.generate("a", GREEDY, use_tqdm=False, lora_request=lora_request)
        return error.value.message

    assert "was loaded from" in message(LoRARequest("both", 1, str(folders["text"])))
    assert "Set `lora_path`" in message(LoRARequest("unknown"))
    assert "is the model's name" in message(LoRARequest("base", 1, str(folders["text"])))
    assert "There is no LoRA adapter" in message(LoRARequest("none", 1, "/none"), CheckpointError)
    assert "`lora_request` has 2 entries" in message([None, None])
    with pytest.raises(InvalidParameter, match="`lora_int_id` must be at least 1, got 0"):
        LoRARequest("a", 0, "b")
    with pytest.raises(InvalidParameter, match="`lora_name` must be a name"):
        LoRARequest("", 1, "b")


def test_least_recently_used_lora_is_unloaded(tiny_checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    paths = {name: str(write_lora(tmp_path / name, tiny_checkpoint, ("q_proj",))) for name in "abc"}

    def unloaded():
        return [record.args[0] for record in caplog.records if record.message.endswith("is unloaded.")]

    with VLM(tiny_checkpoint, lora={"a": paths["a"]}, limits={"max_loras": 2}, **OPTIONS) as vlm:
        for name in ("a", "b", "a", "c", "a", "b", "b"):
            tokens(vlm, "x", LoRARequest(name, 1, paths[name]))
    assert unloaded() == ["b", "c"]
    sizes = [record.message for record in caplog.records if "MiB in its file" in record.message]
    assert len(sizes) == 4


def with_manager(checkpoint, folder, scenario, *, max_loras):
    """Run `scenario(manager, request)`; `request` returns a request with an adapter of this name, which it writes."""
    spec, script = read_spec(checkpoint), Script("Yes.", supported_params=EVERYTHING)

    def request(name):
        path = folder / name
        if not path.exists():
            write_lora(path, checkpoint, ("q_proj",))
        return request_with(LoRARequest(name, 1, str(path)))

    async def run():
        decoder = Supervisor(lambda: ScriptedDecoder(script, spec=spec, config=EngineConfig()), restarts=0)
        await decoder.start()
        config = EngineConfig(model="m", limits={"max_loras": max_loras})
        await scenario(LoraManager(config, spec, decoder, load_encoder=lambda lora: None), request)
        await decoder.close()

    asyncio.run(run())


def request_with(lora_request):
    return OfflineRequest.parse({"prompt": "x", "lora_request": lora_request})


async def use(manager, request):
    """Return the name of the adapter of a request."""
    async with manager.use(request) as active:
        return active.weights.name


def test_loras_in_use_are_not_unloaded(tiny_checkpoint, tmp_path):
    async def scenario(manager, request):
        async with manager.use(request("a")) as first, manager.use(request("a")) as second:
            assert first is second
            with pytest.raises(QueueFull, match="1 LoRA adapters are loaded and in use"):
                await use(manager, request("b"))
        assert await use(manager, request("b")) == "b"

    with_manager(tiny_checkpoint, tmp_path, scenario, max_loras=1)


def test_lora_that_cannot_be_loaded_unloads_no_other(tiny_checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")

    async def scenario(manager, request):
        await use(manager, request("a"))
        with pytest.raises(CheckpointError, match="There is no LoRA adapter"):
            await use(manager, request_with(LoRARequest("b", 1, "/none")))
        assert await use(manager, request_with(LoRARequest("a"))) == "a"

    with_manager(tiny_checkpoint, tmp_path, scenario, max_loras=1)
    assert "is unloaded" not in caplog.text


def test_loaded_lora_does_not_wait_for_another(tiny_checkpoint, tmp_path):
    async def scenario(manager, request):
        await use(manager, request("a"))
        go = asyncio.Event()
        manager.decoder.load_lora = lambda lora: go.wait()
        loading = asyncio.create_task(use(manager, request("b")))
        await auntil(manager._loading.locked)
        assert await asyncio.wait_for(use(manager, request("a")), timeout=HANG) == "a"
        assert not loading.done()
        go.set()
        assert await loading == "b"

    with_manager(tiny_checkpoint, tmp_path, scenario, max_loras=2)


def test_damaged_lora_fails_start_and_leaves_no_thread(tiny_checkpoint, tmp_path):
    """The decoder runs already when the adapter is loaded; it must be closed."""
    folder = write_lora(tmp_path / "a", tiny_checkpoint, ("q_proj",))
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    others = set(threading.enumerate())
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read"):
        VLM(tiny_checkpoint, lora={"a": str(folder)}, **OPTIONS)
    until(lambda: not engine_threads(others))


def test_vision_change_that_a_family_does_not_read_is_reported(tiny_checkpoint, tmp_path):
    """A checkpoint can have tensors that its model does not use."""
    base = tmp_path / "base"
    shutil.copytree(tiny_checkpoint, base)
    weights = load_file(base / "model.safetensors")
    weights["visual.unused.weight"] = weights["visual.blocks.0.mlp.fc1.weight"].clone()
    save_file(weights, base / "model.safetensors")
    folder = write_lora(tmp_path / "a", base, ("unused",))
    with pytest.raises(CheckpointError, match=r"does not use 'visual\.unused\.weight'"):
        VLM(base, lora={"a": str(folder)}, **OPTIONS)


@pytest.mark.supports("lora", backend="dashinfer-cpu", rejected=True)
@pytest.mark.supports("lora", backend="dashinfer-cuda", rejected=True)
def test_decoder_without_lora_is_not_selected(tiny_checkpoint, caplog):
    caplog.set_level(logging.INFO)
    spec, registry = read_spec(tiny_checkpoint), load_plugins()
    config = EngineConfig(model=str(tiny_checkpoint), lora=(LoraModule("a", "/a"),))
    factory, reason = select_decoder(registry, spec, config)
    assert factory.name == "torch"
    assert "dashinfer: It does not apply LoRA adapters" in reason
    assert "Decoder torch: PyTorch runs on any device" in caplog.text
    assert ("dashinfer: It does not" in caplog.text) == bool(cuda_devices())
    with pytest.raises(SetupError, match="dashinfer: It does not apply LoRA adapters"):
        select_decoder(registry, spec, config.model_copy(update={"decoder": "dashinfer"}))


def test_lora_request_to_decoder_without_lora(tiny_checkpoint):
    script = Script("Yes.", supported_params=EVERYTHING - {LORA})
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with (
        Engine(config, registry=scripted_registry(script)) as engine,
        pytest.raises(UnsupportedParameter, match="does not support LoRA adapters"),
    ):
        VLM(engine=engine).generate("x", use_tqdm=False, lora_request=LoRARequest("a", 1, "/a"))
