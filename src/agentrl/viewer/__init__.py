"""`agentrl view`: pages about runs in a browser.

    command.py     the verb
    server.py      routes, who may look, and what a page is when something is missing
    places.py      where runs are, and their databases, opened when somebody looks
    run_page.py, step_page.py, records_page.py, group_page.py, trajectory_page.py,
    failures_page.py   what one page shows, read from the database
    services.py, samplers.py, timeline.py   parts of pages
    record_search.py   Records by conditions and texts, in bounded time
    shown.py       numbers and times as people read them
    templates/, static/   the pages, in Jinja; one style sheet, one script, and two libraries

Each page is a whole document with an address of its own. A page of a live run reads itself again
every two seconds, and changes in place. Nothing comes from elsewhere.
"""
