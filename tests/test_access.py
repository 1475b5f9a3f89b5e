"""Where servers of ours are, and who reaches them."""

import socket

import pytest

from agentrl.access import is_loopback, reached_at


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0:0::0"])
def test_a_url_has_the_name_of_the_machine_for_a_server_on_all_addresses(host: str) -> None:
    assert reached_at(host) == socket.gethostname()
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "named"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")],
)
def test_a_url_has_any_other_host_as_it_is_given(host: str, named: str) -> None:
    assert reached_at(host) == named
    assert is_loopback(host)
