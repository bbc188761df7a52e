"""The table of optimizers against Transformers' names, the names of the field, and published learning rates."""

from __future__ import annotations

import pytest
from transformers.training_args import OptimizerNames

from toolkit.recipe.optimizers import OPTIMIZERS, Traits
from toolkit.recipe.schema import Recipe


def test_every_name_is_one_of_transformers_or_a_short_one() -> None:
    theirs = {str(name.value) for name in OptimizerNames}
    assert {traits.transformers_name or name for name, traits in OPTIMIZERS.items()} <= theirs
    # For hardware that is not supported, or of a package that nobody maintains.
    missing = theirs - set(OPTIMIZERS)
    assert missing == {"adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"}
    assert set(OPTIMIZERS) - theirs == {"adamw", "lion", "muon"}


def test_what_a_name_says_is_so() -> None:
    for name, traits in OPTIMIZERS.items():
        assert traits.bits == (4 if "4bit" in name else 8 if "8bit" in name else 32), name
        assert traits.layerwise == name.endswith("_layerwise"), name
        assert bool(traits.unpaged) == name.startswith("paged_"), name
        assert bool(traits.rank) == name.startswith(("galore", "apollo")), name
        assert traits.in_backward == ("layerwise" in name or "lomo" in name), name
        assert traits.factored == ("adafactor" in name or name == "adalomo"), name
        families = ("ademamix", "lion", "rmsprop", "adagrad", "galore", "apollo", "lomo", "muon", "schedule_free")
        family = next((each for each in families if each in name), {"sgd": "sgd", "adafactor": "adafactor"}.get(name))
        assert traits.family == (family or "adam"), name


def test_an_optimizer_leads_to_the_same_one_on_the_device_and_in_8_bits() -> None:
    for name, traits in OPTIMIZERS.items():
        if traits.unpaged:
            other = OPTIMIZERS[traits.unpaged]
            assert (other.family, other.bits, other.unpaged) == (traits.family, traits.bits, ""), name
        if traits.eight_bit:
            other = OPTIMIZERS[traits.eight_bit]
            assert (other.family, other.bits, other.unpaged) == (traits.family, 8, "") and traits.bits == 32, name
    fitting = {"adam", "ademamix", "lion"}
    short = {name for name, traits in OPTIMIZERS.items() if traits.family in fitting and traits.bits == 32}
    assert {name for name in short if not OPTIMIZERS[name].eight_bit} == {"grokadamw", "stable_adamw"}


PACKAGES = {
    "adamw_torch_": ("torchao", "torchao"),
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "schedule_free": ("schedulefree", "schedulefree"),
}
"""How names begin to the module that Transformers imports for them, and what pip calls it."""
BITSANDBYTES = ("adamw_8bit", "adamw_bnb", "ademamix", "lion", "paged", "rmsprop_bnb")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_has_to_be_installed_has_its_name_on_pypi(name: str) -> None:
    own = "transformers" if name == "adafactor" else "bitsandbytes" if name.startswith(BITSANDBYTES) else "torch"
    bits = name.endswith("bit")
    begins = (start for start in PACKAGES if name.startswith(start) and (bits or start != "adamw_torch_"))
    expected = PACKAGES.get(next(begins, ""), (own, ""))
    assert (OPTIMIZERS[name].module, OPTIMIZERS[name].package) == expected


READS = {
    "betas eps": "adamw adamw_8bit adamw_torch_4bit ademamix galore_adamw apollo_adamw_layerwise grokadamw "
    "stable_adamw schedule_free_radam schedule_free_adamw",
    "betas": "lion paged_lion_8bit",
    "betas eps momentum": "muon",
    "momentum": "sgd schedule_free_sgd",
    "": "adagrad adafactor rmsprop rmsprop_bnb galore_adafactor galore_adafactor_layerwise lomo adalomo",
}


@pytest.mark.parametrize(("keys", "name"), [(keys, name) for keys, names in READS.items() for name in names.split()])
def test_an_optimizer_reads_the_keys_of_its_family(keys: str, name: str) -> None:
    expected = set(keys.replace("betas", "beta1 beta2").split())
    traits = OPTIMIZERS[name]
    assert traits.reads == expected
    assert (
        traits.key_of("lr") == "optimizer.learning_rate" and traits.key_of("weight_decay") == "optimizer.weight_decay"
    )
    for key in ("beta1", "eps", "momentum"):
        assert traits.key_of(key) == (f"optimizer.{key}" if key in expected else ""), key
    assert traits.key_of("rank") == ""


# What their authors, or Transformers' examples, train with; and what is far from it.
RATES = [
    *(
        ("adamw", 2e-5, 1e-8, 0.1),
        ("lion", 3e-6, 1e-9, 3e-2),
        ("sgd", 1e-2, 1e-8, 10.0),
        ("adafactor", 1e-3, 1e-8, 1.0),
    ),
    *(
        ("muon", 2e-2, 1e-8, 1.0),
        ("lomo", 3e-2, 1e-8, 10.0),
        ("galore_adamw", 1e-2, 1e-8, 0.5),
        ("rmsprop", 1e-4, 1e-9, 0.1),
    ),
    *(("apollo_adamw", 1e-2, 1e-8, 0.5), ("adagrad", 1e-2, 1e-8, 1.0), ("schedule_free_sgd", 5.0, 1e-8, 100.0)),
]


@pytest.mark.parametrize(("name", "usual", "low", "high"), RATES)
def test_a_published_rate_is_usual_and_one_far_from_it_is_not(name: str, usual: float, low: float, high: float) -> None:
    lowest, highest = OPTIMIZERS[name].usual_rates
    assert low < lowest < usual < highest < high
    assert lowest < highest / 100, "full fine-tuning and adapters are ten times apart"


def test_an_optimizer_updates_all_or_leaves_the_rest_to_another() -> None:
    assert {name for name, traits in OPTIMIZERS.items() if traits.rest} == {"muon"}
    places = [((4, 4), "layer"), ((4,), "layer"), ((4, 4, 4), "layer"), ((4, 4), "embedding"), ((4, 4), "head")]
    assert [OPTIMIZERS["muon"].updates(*place) for place in places] == [True, False, False, False, False]
    assert all(OPTIMIZERS["adamw"].updates(*place) for place in places)
    assert OPTIMIZERS["muon"].rest in OPTIMIZERS


def test_momentum_is_stated_or_the_optimizers_own() -> None:
    def stated(**settings: object) -> float | None:
        content = {"model": {"path": "a"}, "data": {"sources": ["b"]}, "optimizer": settings}
        return Recipe.model_validate(content).optimizer.stated_momentum

    assert [stated(name=name) for name in ("sgd", "schedule_free_sgd", "muon", "adamw")] == [0.9, 0.9, 0.95, None]
    assert stated(name="sgd", momentum=0.0) == 0.0 and stated(name="muon", momentum=0.8) == 0.8


def test_a_plain_entry_has_no_moments_but_adams() -> None:
    plain = Traits("new", "adam")
    assert (plain.moments, plain.bits, plain.module, plain.decays) == (2, 32, "torch", True)
    assert plain.state_dtype("bfloat16") == "bfloat16" and not plain.foreach and plain.copies == 0
    assert OPTIMIZERS["lion"].state_dtype("bfloat16") == "float32"
