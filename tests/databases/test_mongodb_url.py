"""A MongoDB URL that cannot be used, and its password, which nobody is told."""

from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ports import free_port
from pymongo.uri_parser import parse_uri

from agentrl.databases.connection import DatabaseUnreachable, connect
from agentrl.databases.mongodb_url import why_no_url
from agentrl.databases.run_list import server
from agentrl.redaction import without_passwords

SECRET = "hunter"
ODD = st.text("/#@%:?,[]&+=x ", max_size=6).map(lambda text: text.replace(" ", ""))
HOSTS = ("db:27017", "a:1,b:2/?replicaSet=rs0", "[::1]:7/?tls=true")


@given(ODD, ODD, st.sampled_from(HOSTS), st.sampled_from(("mongodb", "mongodb+srv")))
@example("/", "#@%", "db:27017", "mongodb")
@example("", "://", "db:27017", "mongodb")
def test_no_part_of_a_password_is_told_whatever_is_in_it(
    before: str, after: str, hosts: str, scheme: str
) -> None:
    url = f"{scheme}://me:{before}{SECRET}{after}{SECRET}@{hosts}"
    assert SECRET not in without_passwords(f"cannot use {url}, sorry")
    fault = why_no_url(url)
    assert fault is None or SECRET not in fault


async def test_a_password_as_it_is_in_a_url_is_refused_with_what_to_do() -> None:
    for password in (f"a/{SECRET}", f"{SECRET}%zz", f"a#{SECRET}@b/c", f"a?{SECRET}", f"{SECRET}#"):
        url = f"mongodb://me:{password}@127.0.0.1:1/?replicaSet=rs0"
        with pytest.raises(DatabaseUnreachable, match="as %XX") as refused:
            await connect(url, "run")
        assert SECRET not in str(refused.value)


def test_a_url_that_is_not_filled_in_is_refused_with_what_is_missing() -> None:
    for url in ("mongodb://<YOUR_DB_HOST>:1/r", "mongodb://me:p@<YOUR_DB_HOST>,b/r"):
        assert str(why_no_url(url)).endswith(": <YOUR_DB_HOST> is to be filled in")
    assert "<host> is" in str(why_no_url("mongodb+srv://me:p@<host>/"))
    assert "<YOUR_PW> is" in str(why_no_url("mongodb://me:<YOUR_PW>@host"))
    assert SECRET not in str(why_no_url(f"mongodb://me:<{SECRET}>@host"))


async def test_what_else_is_wrong_with_a_url_is_said_beside_a_password() -> None:
    url = f"mongodb://me:{SECRET}%2F@127.0.0.1:99999"
    with pytest.raises(DatabaseUnreachable, match="65535") as refused:
        await connect(url, "run")
    assert SECRET not in str(refused.value)


async def test_a_name_that_dns_does_not_know_is_one_sentence() -> None:
    url = f"mongodb+srv://me:{SECRET}@nowhere.example.invalid/"
    with pytest.raises(DatabaseUnreachable, match="cannot be asked") as refused:
        await connect(url, "run", only_look=True)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("way", ["connect", "server"])
async def test_a_database_that_does_not_answer_is_told_of_while_it_is_waited_for(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"mongodb://me:{SECRET}@127.0.0.1:{free_port()}"

    async def open_it() -> None:
        if way == "connect":
            await connect(url, "run", 3.0)
        else:
            async with server(url, 3.0):
                pass

    with pytest.raises(DatabaseUnreachable):
        await open_it()
    [told] = caplog.messages
    assert told.startswith("waiting for MongoDB at mongodb://***@") and told.endswith("up to 3 s")
    assert SECRET not in told


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
def test_any_password_written_in_percents_is_taken(password: str) -> None:
    url = f"mongodb://me:{quote(password, safe='')}@db:1/?replicaSet=rs0"
    assert why_no_url(url) is None
    assert parse_uri(url)["password"] == password
