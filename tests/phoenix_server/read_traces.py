"""Run by Phoenix's Python: the traces of a project and their sessions, by Phoenix's own client.

python read_traces.py URL PROJECT
"""

import json
import sys

from phoenix.client import Client

url, project = sys.argv[1:]
client = Client(base_url=url)
traces = client.traces.get_traces(project_identifier=project, limit=500)
for trace in traces:
    trace["spans"] = client.spans.get_spans(
        project_identifier=project, trace_ids=[trace["trace_id"]], limit=500
    )
sessions = client.sessions.list(project_name=project)
print(
    json.dumps(
        {
            "traces": traces,
            "sessions": {
                session["session_id"]: client.sessions.get_session_turns(
                    session_id=session["session_id"]
                )
                for session in sessions
            },
        },
        default=str,
    )
)
