"""Writes deploy/grafana/dashboards/agentrl.json: `python scripts/grafana_dashboard.py`.

A panel is one line here: its title, what it shows in one sentence, its unit and its queries. Nobody
reviews 1,500 lines of JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "deploy/grafana/dashboards/agentrl.json"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 8, 7  # of a panel; a row of the page is 24 wide
_STAT_WIDTH, _STAT_HEIGHT = 4, 4
RUN = 'run=~"$run"'
SHARE = "percentunit"
PER_S = "suffix: /s"


@dataclass(frozen=True)
class Panel:
    """A panel. `queries`: expressions by legend. `stacked`: the lines are parts of a sum."""

    title: str
    description: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False


def by(expression: str, *labels: str) -> str:
    """The sum of an expression over all processes of a run, by labels."""
    return f"sum by ({', '.join(('run', *labels))}) ({expression})"


def rate(counter: str, *labels: str) -> str:
    """The growth of a counter per second, over all processes of a run."""
    return by(f"rate({counter}{{{RUN}}}[$__rate_interval])", *labels)


def of_service(figure: str) -> str:
    """A figure of the services of the chosen runs.

    A Prometheus before version 3 asks for OpenMetrics, in which prometheus_client writes `sglang_`.
    """
    return f'{{__name__=~"sglang[:_]{figure}", {RUN}}}'


def of_run(gauge: str, matcher: str = "") -> str:
    """A gauge of the chosen runs."""
    return f"{gauge}{{{', '.join(filter(None, (RUN, matcher)))}}}"


def quantile(q: float) -> str:
    """A quantile of the staleness of trained tokens."""
    buckets = f"rate(agentrl_trained_token_staleness_bucket{{{RUN}}}[$__rate_interval])"
    return f"histogram_quantile({q}, {by(buckets, 'le')})"


def share(part: str, whole: str) -> str:
    """The share of one rate in another."""
    return f"{rate(part)} / {rate(whole)}"


OPEN = f"max by (run, dependency) ({of_run('agentrl_breaker_open')})"
GENERATED = f"rate({of_service('generation_tokens_total')}[$__rate_interval])"
AGE, OLDEST = "agentrl_attempt_age_seconds", 'of="oldest"'

STATS = (
    Panel("Step", "Optimizer steps of the run.", {"{{run}}": of_run("agentrl_ledger_step")}),
    Panel(
        "Since the last step",
        "Time since the weights changed.",
        {"{{run}}": f"time() - {of_run('agentrl_ledger_last_step_timestamp_seconds')}"},
        "s",
    ),
    Panel(
        "Waiting rows",
        "Rows that are ready for training.",
        {"{{run}}": of_run("agentrl_ledger_rows", 'status="ready"')},
    ),
    Panel(
        "Processes that answer",
        "Of those in the list of targets.",
        {"{{run}}": by(of_run("up"))},
    ),
    Panel(
        "Dependencies out",
        "Dependencies that some sampler waits for.",
        {"{{run}}": f"count by (run) ({OPEN} == 1) or sum by (run) (0 * {of_run('up')})"},
    ),
    Panel(
        "In quarantine",
        "Groups, trajectories and rows that wait for a person.",
        {"{{run}}": by(of_run("agentrl_ledger_quarantined"))},
    ),
)  # fmt: skip

ROWS: dict[str, Sequence[Panel]] = {
    "Learning": (
        Panel("Reward", "Mean of each step's rows.", {"{{run}}": of_run("agentrl_reward")}),
        Panel(
            "Mismatch of sampler and trainer",
            "KL over the tokens of a step. It rises when engine and trainer compute differently.",
            {"{{run}}": of_run("agentrl_mismatch_kl")},
            "sci",
        ),
        Panel(
            "Loss and gradient norm",
            "Of each step; the norm before clipping.",
            {
                "loss": of_run("agentrl_loss"),
                "gradient norm": of_run("agentrl_gradient_norm"),
            },
        ),
        Panel(
            "Staleness of trained tokens",
            "In optimizer steps.",
            {"median": quantile(0.5), "95 %": quantile(0.95)},
        ),
        Panel(
            "Clipped and left out",
            "Shares of the tokens, and the effective sample size.",
            {
                "clipped": of_run("agentrl_clip_fraction"),
                "left out": of_run("agentrl_left_out_fraction"),
                "effective": of_run("agentrl_effective_sample_size"),
            },
            SHARE,
        ),
        Panel(
            "Entropy and KL to the reference",
            "With --log_entropy and --beta.",
            {
                "entropy": of_run("agentrl_entropy"),
                "KL to the reference": of_run("agentrl_reference_kl"),
            },
        ),
    ),
    "Throughput": (
        Panel(
            "Tokens per second",
            "Sampled ones, and trained ones without prompts.",
            {
                "sampled": rate("agentrl_generated_tokens_total"),
                "trained": rate("agentrl_trained_tokens_total"),
            },
            PER_S,
        ),
        Panel(
            "Phases of a step",
            "What the trainer does with its time.",
            {"{{phase}}": rate("agentrl_phase_seconds_total", "phase")},
            SHARE,
            stacked=True,
        ),
        Panel(
            "Rows by status",
            "Trained ones are not shown.",
            {"{{status}}": of_run("agentrl_ledger_rows", 'status!="trained"')},
        ),
    ),
    "Sampling": (
        Panel(
            "Attempts in progress",
            "All samplers together, and how many there may be by the services' load.",
            {
                "to {{step}}": by(of_run("agentrl_attempts"), "step"),
                "limit": by(of_run("agentrl_attempt_limit")),
            },
        ),
        Panel(
            "Age of attempts",
            "The oldest of all samplers, and the median of each.",
            {
                "oldest": f"max by (run) ({of_run(AGE, OLDEST)})",
                "median, {{process}}": of_run(AGE, 'of="median"'),
            },
            "s",
        ),
        Panel(
            "Steps of attempts per second",
            "Successes, and failures by class.",
            {"{{event}}": f"{rate('agentrl_attempt_events_total', 'event')} > 0"},
            PER_S,
        ),
        Panel(
            "Why trajectories end",
            "Per second.",
            {"{{stop_reason}}": rate("agentrl_trajectories_total", "stop_reason")},
            PER_S,
            stacked=True,
        ),
        Panel(
            "Tool calls per second",
            "By tool and result.",
            {"{{tool}}, {{result}}": rate("agentrl_tool_calls_total", "tool", "result")},
            PER_S,
        ),
        Panel(
            "Time of a tool call",
            "Mean by tool.",
            {
                "{{tool}}": f"{rate('agentrl_tool_seconds_total', 'tool')}"
                f" / {rate('agentrl_tool_calls_total', 'tool')}"
            },
            "s",
        ),
        Panel(
            "Time of a request to the model",
            "Mean over turns, with retries.",
            {"{{run}}": share("agentrl_generate_seconds_total", "agentrl_turns_total")},
            "s",
        ),
        Panel(
            "Requests that went on elsewhere",
            "Per second, by why their service failed them.",
            {"{{reason}}": rate("agentrl_request_retries_total", "reason")},
            PER_S,
        ),
        Panel(
            "Leases",
            "Held ones; how long the first still lasts; ended ones that nobody has reaped.",
            {
                "held": by(of_run("agentrl_leases")),
                "seconds left": f"min by (run) ({of_run('agentrl_lease_remaining_seconds')})",
                "expired": of_run("agentrl_ledger_expired_leases"),
            },
        ),
    ),
    "Inference services": (
        Panel(
            "Requests",
            "That generate, and that wait.",
            {
                "{{process}} running": of_service("num_running_reqs"),
                "{{process}} waiting": of_service("num_queue_reqs"),
            },
        ),
        Panel(
            "Generated tokens per second",
            "By service.",
            {"{{process}}": by(GENERATED, "process")},
            PER_S,
        ),
        Panel(
            "Cache",
            "Share in use, and share of prompt tokens found there.",
            {
                "{{process}} in use": of_service("token_usage"),
                "{{process}} hits": of_service("cache_hit_rate"),
            },
            SHARE,
        ),
        Panel(
            "Policy version",
            "Of each live service. One that stays behind gets no requests.",
            {"{{service}}": of_run("agentrl_ledger_service_weight_version")},
        ),
        Panel(
            "Outstanding tokens",
            "Of the samplers' requests in flight: prompts and largest outputs.",
            {"{{service}}": by(of_run("agentrl_service_outstanding_tokens"), "service")},
        ),
        Panel(
            "Pause for a publication",
            "The longest of a service.",
            {"{{run}}": of_run("agentrl_service_stall_seconds")},
            "s",
        ),
    ),
    "Failures": (
        Panel(
            "Open breakers",
            "1 while tasks that need the dependency are held back.",
            {"{{dependency}}": OPEN},
            kind="state-timeline",
        ),
        Panel(
            "Failed attempts of this launch",
            "By the class of their error.",
            {"{{raised}}": of_run("agentrl_ledger_failed_attempts")},
        ),
        Panel(
            "Trajectories by status",
            "Those that are in progress, failed or in quarantine.",
            {"{{status}}": of_run("agentrl_ledger_records", 'status!="ended"')},
        ),
    ),
    "Gateway": (
        Panel(
            "Sessions and waiting clients",
            "Of programs on other machines.",
            {
                "sessions": of_run("agentrl_gateway_sessions"),
                "waiting": of_run("agentrl_gateway_waiting_clients"),
            },
        ),
        Panel(
            "Requests per second",
            "By route and status.",
            {"{{route}} {{status}}": rate("agentrl_gateway_requests_total", "route", "status")},
            PER_S,
        ),
    ),
    "Processes": (
        Panel(
            "CPU",
            "Cores in use.",
            {"{{process}}": f"rate(process_cpu_seconds_total{{{RUN}}}[$__rate_interval])"},
        ),
        Panel(
            "Memory",
            "Resident, of each process itself.",
            {"{{process}}": of_run("process_resident_memory_bytes")},
            "bytes",
        ),
        Panel(
            "Looks at the ledger",
            "How long one takes, in which mongod counts.",
            {"{{run}}": of_run("agentrl_ledger_read_seconds")},
            "s",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's file provider reads it."""
    panels: list[dict[str, Any]] = []
    for place, panel in enumerate(STATS):
        at = {"x": place * _STAT_WIDTH, "y": 0, "w": _STAT_WIDTH, "h": _STAT_HEIGHT}
        panels.append(_stat(panel, at, len(panels) + 1))
    top = _STAT_HEIGHT
    for title, row in ROWS.items():
        at = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": at,
             "collapsed": False, "panels": []}
        )  # fmt: skip
        top += 1
        for place, panel in enumerate(row):
            line, column = divmod(place, 24 // _WIDTH)
            at = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_graph(panel, at, len(panels) + 1))
        top += -(-len(row) // (24 // _WIDTH)) * _HEIGHT
    return {
        "uid": "agentrl",
        "title": "AgentRL",
        "description": "Runs of AgentRL: learning, throughput, sampling, services, failures.",
        "tags": ["agentrl"],
        "timezone": "browser",
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    runs = "label_values(agentrl_ledger_up, run)"
    return [
        {
            "name": "datasource", "label": "Prometheus", "type": "datasource",
            "query": "prometheus", "hide": 0,
        },
        {
            "name": "run", "label": "Run", "type": "query", "datasource": _SOURCE,
            "query": {"query": runs, "refId": "runs"}, "refresh": 2,
            "sort": 1, "multi": True, "includeAll": True, "allValue": ".+",
            "current": {"text": ["All"], "value": ["$__all"]}, "hide": 0,
        },
    ]  # fmt: skip


def _graph(panel: Panel, at: dict[str, int], number: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 70, "lineWidth": 0}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}
    }
    if panel.kind == "timeseries":
        custom = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        options = {
            "legend": {
                "displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }  # fmt: skip
    return {
        **_panel(panel, panel.kind, at, number),
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
    }


def _stat(panel: Panel, at: dict[str, int], number: int) -> dict[str, Any]:
    return {
        **_panel(panel, "stat", at, number),
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {
            "graphMode": "area",
            "colorMode": "value",
            "textMode": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _panel(panel: Panel, kind: str, at: dict[str, int], number: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": expression,
         "legendFormat": legend}
        for place, (legend, expression) in enumerate(panel.queries.items())
    ]  # fmt: skip
    return {
        "id": number,
        "type": kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": at,
        "targets": targets,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
