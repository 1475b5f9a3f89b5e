"""Visits pages in Chromium, and prints what was found as JSON. Runs in an environment of its own.

python visit.py ADDRESS FOLDER < JSON list of visits: {"path", "name", "do": [[action, ...], ...]}

An action: ["click", selector], ["hover", selector], ["choose", selector, value],
["fill", selector, text], ["leave", selector] (the focus goes away), ["press", key],
["wait", milliseconds], ["wait_for", selector, milliseconds], ["forget"] (all cookies),
["text", selector] (kept), ["value", selector] (of a field, kept), ["count", selector] (kept),
["seen", selector, milliseconds] (when it is there is kept), ["timed", [action, ...]] (its seconds
are kept).
"""

import json
import sys
import time

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

SERIOUS = ("serious", "critical")


def act(page: Page, action: list, kept: list) -> None:
    match action:
        case ["click", selector]:
            page.click(selector)
        case ["hover", selector]:
            page.hover(selector)
        case ["choose", selector, value]:
            page.select_option(selector, value)
        case ["fill", selector, text]:
            page.fill(selector, text)
        case ["leave", selector]:
            page.locator(selector).blur()
        case ["value", selector]:
            kept.append(page.input_value(selector))
        case ["forget"]:
            page.context.clear_cookies()
        case ["press", key]:
            page.keyboard.press(key)
        case ["wait", ms]:
            page.wait_for_timeout(ms)
        case ["wait_for", selector, ms]:
            page.wait_for_selector(selector, timeout=ms)
        case ["text", selector]:
            kept.append(page.inner_text(selector))
        case ["count", selector]:
            kept.append(page.locator(selector).count())
        case ["seen", selector, ms]:
            page.wait_for_selector(selector, timeout=ms)
            kept.append(time.time())
        case ["timed", actions]:
            began = time.monotonic()
            for each in actions:
                act(page, each, kept)
            kept.append(time.monotonic() - began)
        case _:
            raise ValueError(f"no such action: {action}")


def main() -> None:
    address, folder = sys.argv[1:]
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for visit in json.load(sys.stdin):
            context = browser.new_context(
                viewport={"width": visit.get("width", 1280), "height": 900},
                color_scheme=visit.get("scheme", "light"),
            )
            login = context.new_page()  # its own: leaving it may abort a request of its
            login.goto(address, wait_until="networkidle")  # which leaves the cookie
            login.close()
            page = context.new_page()
            errors: list[str] = []
            page.on("console", lambda m, e=errors: e.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda error, e=errors: e.append(str(error)))
            page.on("requestfailed", lambda request, e=errors: e.append(request.url))
            began = time.monotonic()
            page.goto(address.partition("/run/")[0] + visit["path"])
            seconds = time.monotonic() - began
            page.wait_for_timeout(400)
            kept: list = []
            for action in visit.get("do", []):
                act(page, action, kept)
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth + 1")
            faults = [
                f"{fault['id']}: {fault['help']}: {fault['nodes'][0]['html'][:120]}"
                for fault in Axe().run(page).response["violations"]
                if fault["impact"] in SERIOUS
            ]
            page.screenshot(path=f"{folder}/{visit['name']}.png")
            found.append(
                {
                    "name": visit["name"],
                    "title": page.title(),
                    "path": page.url,
                    "kept": kept,
                    "errors": errors,
                    "faults": faults,
                    "wide": wide,
                    "seconds": seconds,
                    "text": page.inner_text("main"),
                }
            )
            context.close()
        browser.close()
    json.dump(found, sys.stdout)


main()
