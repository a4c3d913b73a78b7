from dataclasses import asdict

import pytest
import torch

from benchmarks.rivals.contestants import CONTESTANTS, clip_loss, take_turn
from benchmarks.rivals.loop_bench import Bench, Task
from benchmarks.training import CONTESTANTS as NAMES
from mm_utils import distributed
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.build import ModelArguments
from mm_utils.objectives.losses import gather_batch, info_nce


@pytest.fixture
def bench_of(corpus, monkeypatch):
    monkeypatch.setenv(
        "LOCAL_WORLD_SIZE", str(distributed.available_cores())
    )  # one thread; more only wait for each other

    def build(contestant: str, **changes):
        data = asdict(DataArguments(train_file=str(corpus)))
        loader = asdict(LoaderArguments(dataloader_num_workers=0))
        model = asdict(ModelArguments(image_size=32))
        settings = {
            "synthetic": False,
            "peers_keep_memory": True,
            "peers_channels_last": False,
            "caption_tokens": "real",
        }
        return Bench(Task(contestant, 8, **{**settings, **changes}, data=data, loader=loader, model=model))

    return build


def test_the_script_knows_all_contestants():
    assert list(CONTESTANTS) == NAMES.split(",")


@pytest.mark.parametrize(
    ("name", "synthetic"),
    [*((name, False) for name in CONTESTANTS), ("tandem", True), ("transformers", True), ("open_clip", True)],
)
def test_every_contestant_trains(name, synthetic, bench_of):
    bench = bench_of(name, synthetic=synthetic, caption_tokens="6")
    before = {name: value.clone() for name, value in bench.model.state_dict().items()}
    steps = CONTESTANTS[name](bench)
    turn = take_turn(bench, steps, uncounted=1, counted=2)
    assert turn["pairs"] == 16
    assert turn["seconds"] > 0
    assert turn["tokens_real"] == 16 * 6  # every caption is longer, and cut
    width = {"open_clip": 77, "transformers": 128, "transformers_workers": 128, "tandem_padded_77": 77}.get(name, 6)
    assert turn["tokens_computed"] == 16 * width
    if name.startswith(("tandem", "two_pass")):  # the peers train a copy
        assert any(not torch.equal(value, before[name]) for name, value in bench.model.state_dict().items())


def test_peers_train_the_same_model(bench_of):
    bench = bench_of("transformers")
    stock = bench.stock_model()
    pixels = torch.randn(4, 3, 32, 32)
    tokens = bench.random_tokens(12)
    with torch.no_grad():
        found = stock(pixel_values=pixels, **{name: value[:4] for name, value in tokens.items()})
        image_NE = bench.model.encode_image(pixels)[0]
        text_NE = bench.model.encode_text(*(value[:4] for value in tokens.values()))[0]
    torch.testing.assert_close(found.image_embeds, image_NE)
    torch.testing.assert_close(found.text_embeds, text_NE)
    count = sum(parameter.numel() for parameter in bench.model.parameters())
    assert sum(parameter.numel() for parameter in stock.parameters()) == count
    assert all(value.is_contiguous() for value in stock.parameters())


@pytest.mark.parametrize("name", ["tandem_cached_2", "two_pass_2", "two_pass_8"])
def test_gradient_caching_has_the_gradient_of_the_single_pass(name, bench_of):
    def gradients(name: str) -> dict[str, torch.Tensor]:
        bench, found = bench_of(name, synthetic=True, caption_tokens="6"), {}

        def record(parameters, norm):
            found.update({name: value.grad.clone() for name, value in bench.model.named_parameters()})

        bench.accelerator.clip_grad_norm_ = record
        torch.manual_seed(0)
        next(CONTESTANTS[name](bench))
        return found

    right, found = gradients("tandem"), gradients(name)
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, right[parameter], rtol=1e-4, atol=1e-6 * largest)


def test_clip_loss_is_the_projects_where_all_pairs_differ():
    image_NE, text_NE = (torch.nn.functional.normalize(torch.randn(6, 4), dim=-1) for _ in range(2))
    ids = torch.arange(12).view(6, 2)
    right = info_nce(image_NE, text_NE, torch.tensor(9.0), gather_batch(image_NE, text_NE, ids))
    torch.testing.assert_close(clip_loss(image_NE, text_NE, torch.tensor(9.0)), right)
