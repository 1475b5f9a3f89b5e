"""Which tools the model gets, and under which names."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs import ConfigError, comma_separated
from agentrl.rollout.tools.catalogue import Offer, catalogue

WEB = (Offer("web", "search"), Offer("web", "fetch"))
WIKI = (Offer("my wiki", "search"), Offer("my wiki", "edit"))


def names(*offers: Offer, allow: str = "", block: str = "") -> list[str]:
    return list(catalogue(offers, comma_separated(allow), comma_separated(block)).tools)


def test_tools_keep_their_names_unless_two_servers_offer_the_same() -> None:
    assert names(*WEB) == ["search", "fetch"]
    made = catalogue([*WEB, *WIKI])
    assert list(made.tools) == ["web__search", "fetch", "my_wiki__search", "edit"]
    assert made.renamed == ("web__search", "my_wiki__search")
    assert made.tools["my_wiki__search"] == WIKI[0]


def test_what_is_blocked_takes_no_name_from_others() -> None:
    assert names(*WEB, *WIKI, block="web.search") == ["fetch", "search", "edit"]


@pytest.mark.parametrize(
    ("allow", "block", "left"),
    [
        ("search", "", ["web__search", "my_wiki__search"]),
        ("web.*, edit", "", ["search", "fetch", "edit"]),
        ("", "*.search", ["fetch", "edit"]),
        ("*", "[ef]*", ["web__search", "my_wiki__search"]),
        ("web.*", "fetch", ["search"]),
    ],
)
def test_patterns_match_a_tool_or_a_tool_of_a_server(
    allow: str, block: str, left: list[str]
) -> None:
    assert names(*WEB, *WIKI, allow=allow, block=block) == left


@pytest.mark.parametrize("flag", ["allow", "block"])
def test_a_pattern_that_matches_nothing_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--mcp_{flag}_tools: 'serch' matches no tool; .*fetch"):
        names(*WEB, **{flag: "search,serch"})


def test_tools_for_the_sampler_are_not_for_the_model() -> None:
    assert names(Offer("a", "create_session"), Offer("a", "close_session"), Offer("a", "run")) == [
        "run"
    ]


def test_names_that_stay_ambiguous_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools would both be called a__x"):
        names(Offer("a", "x"), Offer("b", "x"), Offer("c", "a__x"))


def test_a_schema_is_openais() -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}}
    [schema] = catalogue([Offer("web", "search", "Finds.", parameters)]).schemas
    assert schema == {
        "type": "function",
        "function": {"name": "search", "description": "Finds.", "parameters": parameters},
    }


OFFERS = st.lists(
    st.builds(Offer, st.sampled_from("ab"), st.sampled_from("xyz")),
    unique_by=lambda offer: offer.full_name,
)


@given(OFFERS, st.randoms())
def test_every_tool_has_one_name_whatever_the_order(offers: list[Offer], random: Random) -> None:
    made = catalogue(offers).tools
    assert sorted(made.values(), key=repr) == sorted(offers, key=repr)
    shuffled = random.sample(offers, len(offers))
    assert dict(catalogue(shuffled).tools) == dict(made)
