"""Set the run database up, and make or remove the user of a run.

    python administer.py initiate ADDRESS[:PORT] ... [--ca FILE]
    python administer.py add-run RUN --url URL
    python administer.py rotate-run RUN --url URL
    python administer.py retire-run RUN --url URL
    python administer.py remove-run RUN --url URL

`initiate` runs once, on the node of the first ADDRESS: it joins the members to a replica set and
makes the user `admin`. `add-run` prints the connection string of a user that can do what a run
does in the database RUN, and nothing else or elsewhere: it reads and writes documents, makes
collections and indexes and watches changes; it drops nothing and removes nothing but the entries of
its services and of what its samplers wait for. `rotate-run` prints the connection string of a
further user of the run, beside those that it has: processes are started anew with it one after the
other, while the others go on. `retire-run` then takes all users of the run away but the newest.
`remove-run` takes all away and leaves the data. All need `--url` with the administrator's name and
password; what is printed holds a password.
"""

import argparse
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit

from pymongo import MongoClient
from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

REPLICA_SET = "rs0"
PORT = 27017
_ROLE = "run"
_DOCUMENTS = (
    "find", "insert", "update", "createCollection", "createIndex", "listCollections",
    "listIndexes", "changeStream",
)  # fmt: skip
_PASSING = ("inference_services", "outages")  # collections whose entries go away
_PATIENCE_S = 60.0
_ROLE_NOT_FOUND = 31  # error code of mongod

Client = MongoClient[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    initiate_ = verbs.add_parser("initiate", help="make the replica set and its administrator")
    initiate_.add_argument("members", nargs="+", metavar="ADDRESS[:PORT]")
    initiate_.add_argument("--ca", help="ca.pem, if the members want TLS")
    for verb, help_ in (
        ("add-run", "make a run's user"),
        ("rotate-run", "make a further user of a run, with a password of its own"),
        ("retire-run", "remove all users of a run but the newest"),
        ("remove-run", "remove all users of a run"),
    ):
        run = verbs.add_parser(verb, help=help_)
        run.add_argument("run", help="the run's name, which is its database's")
        run.add_argument(
            "--url", default=os.environ.get("ADMIN_URL"), help="the administrator's (ADMIN_URL)"
        )
    given = parser.parse_args(arguments)
    if given.verb != "initiate" and not given.url:
        parser.error("--url, or ADMIN_URL in the environment, must say where and as whom")
    try:
        if given.verb == "initiate":
            print(initiate(given.members, given.ca))
        elif given.verb == "add-run":
            print(f"DB_URL={add_run(given.run, given.url)}")
        elif given.verb == "rotate-run":
            print(f"DB_URL={rotate_run(given.run, given.url)}")
        elif given.verb == "retire-run":
            retire_run(given.run, given.url)
        else:
            remove_run(given.run, given.url)
    except PyMongoError as error:
        print(f"administer: {given.verb} failed: {error}", file=sys.stderr)
        return 2
    return 0


def initiate(members: Sequence[str], ca: str | None) -> str:
    """Make the replica set of `members` and the user `admin`. Returns the administrator's URL.

    It connects through localhost, where a mongod without users allows making the first one. Run it
    on the node of the first member.
    """
    hosts = [member if ":" in member else f"{member}:{PORT}" for member in members]
    port = int(hosts[0].rpartition(":")[2])
    config = {
        "_id": REPLICA_SET,
        "members": [{"_id": number, "host": host} for number, host in enumerate(hosts)],
    }
    password = secrets.token_urlsafe(24)
    tls = f"&tls=true&tlsCAFile={quote(ca, safe='')}" if ca else ""
    with Client(f"mongodb://localhost:{port}/?directConnection=true{tls}") as client:
        client.admin.command("replSetInitiate", config)
        _await_primary(client)
        client.admin.command("createUser", "admin", pwd=password, roles=["root"])
    options = f"replicaSet={REPLICA_SET}&authSource=admin{tls}"
    return f"mongodb://admin:{password}@{','.join(hosts)}/?{options}"


def _await_primary(client: Client) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not client.admin.command("hello")["isWritablePrimary"]:
        if time.monotonic() > deadline:
            raise ConnectionFailure(
                f"no primary was elected within {_PATIENCE_S:.0f} s: do the members reach each "
                "other under the addresses given?"
            )
        time.sleep(0.1)


def add_run(run: str, admin_url: str) -> str:
    """Make the run's role and user, or set a new password of its newest user. Returns the URL.

    A former password is invalid at once.
    """
    with Client(admin_url) as client:
        users = _users(client, run)
        return _set_user(client, run, users[-1] if users else run, admin_url)


def rotate_run(run: str, admin_url: str) -> str:
    """Make a further user of the run, beside the existing ones. Returns its URL."""
    with Client(admin_url) as client:
        users = _users(client, run)
        number = _number(users[-1], run) + 1 if users else 1
        return _set_user(client, run, f"{run}.{number}" if users else run, admin_url)


def retire_run(run: str, admin_url: str) -> None:
    """Remove all users of the run but the newest."""
    with Client(admin_url) as client:
        for user in _users(client, run)[:-1]:
            client[run].command("dropUser", user)


def remove_run(run: str, admin_url: str) -> None:
    """Remove the run's users and role; its documents stay."""
    with Client(admin_url) as client:
        for user in _users(client, run):
            client[run].command("dropUser", user)
        try:
            client[run].command("dropRole", _ROLE)
        except OperationFailure as error:
            if error.code != _ROLE_NOT_FOUND:
                raise


def _users(client: Client, run: str) -> list[str]:
    """The users of a run, the newest last: RUN, RUN.1, RUN.2 ..."""
    found = [user["user"] for user in client[run].command("usersInfo")["users"]]
    ours = re.compile(rf"{re.escape(run)}(\.\d+)?")
    return sorted(filter(ours.fullmatch, found), key=lambda user: _number(user, run))


def _number(user: str, run: str) -> int:
    return int(user.removeprefix(f"{run}.")) if user != run else 0


def _set_user(client: Client, run: str, user: str, admin_url: str) -> str:
    """Make a user, or set its password. Returns its URL."""
    privileges = [
        {"resource": {"db": run, "collection": ""}, "actions": list(_DOCUMENTS)},
        *(
            {"resource": {"db": run, "collection": name}, "actions": ["remove"]}
            for name in _PASSING
        ),
    ]
    password = secrets.token_urlsafe(24)
    database = client[run]
    verb = "updateRole" if database.command("rolesInfo", _ROLE)["roles"] else "createRole"
    database.command(verb, _ROLE, privileges=privileges, roles=[])
    verb = "updateUser" if database.command("usersInfo", user)["users"] else "createUser"
    database.command(verb, user, pwd=password, roles=[_ROLE])
    return _as_user(admin_url, run, user, password)


def _as_user(admin_url: str, run: str, user: str, password: str) -> str:
    """The administrator's URL with the run's user and password."""
    parts = urlsplit(admin_url)
    hosts = parts.netloc.rpartition("@")[2]
    options = [option for option in parts.query.split("&") if not option.startswith("authSource=")]
    options.append(f"authSource={quote_plus(run)}")
    return f"mongodb://{quote_plus(user)}:{password}@{hosts}/?{'&'.join(options)}"


if __name__ == "__main__":
    sys.exit(main())
