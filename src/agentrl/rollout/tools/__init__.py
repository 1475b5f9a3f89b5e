"""The tools of an agent: MCP servers and aggregators, as each record uses them.

    server_list.py    which servers there are, read and checked without the SDK
    transports.py     the wires to a server: HTTP, SSE, stdio, or none
    wire_faults.py    what fails below MCP, as errors of single calls
    sockets.py        aiohttp's connections below the SDK's HTTP
    stateless.py      calls to servers without sessions, past the SDK's streams
    in_process.py     a server that is an object of this process
    server_thread.py  the thread of its module, and another one if a tool blocks it
    connection.py     one connection over them
    session.py        a session that outlives its connection: shared, or a record's own
    server.py         one MCP server and its sessions
    aggregator.py     servers behind one HTTP API (`/mcpapi`)
    calls.py          what a call is, and how calls fail
    catalogue.py      which tools the model gets, and under which names
    sandboxes.py      what a task gives its tools on the way
    results.py        a result as text for the model, and what else it held
    browse.py         a model that reads long results
    toolbox.py        all of them together: `open_tools`, `ToolBox`, `ToolSession`

Nothing is imported here: the SDK takes a second of CPU, and a check of the flags needs none of it.
"""
