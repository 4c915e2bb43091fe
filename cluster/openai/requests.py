"""``GET /requests`` and ``GET /requests/{request_id}``: the front end's journal."""

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from cluster.journal import Journal
from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError, invalid

FRONT_END_HEADER = "X-Front-End"
"""Which front end has answered. A request's id names its own behind the dash."""
_SHOWN = 50


def add_requests(app: FastAPI, journal: Journal) -> None:
    """Give the application its routes."""
    headers = {FRONT_END_HEADER: journal.front_end}

    def answer(content: object) -> Response:
        return Response(to_json(content), headers=headers, media_type="application/json")

    @app.get("/requests")
    async def requests_route(request: Request) -> Response:
        return answer(journal.latest(_limit(request.query_params.get("limit"))))

    @app.get("/requests/{request_id}")
    async def request_route(request_id: str) -> Response:
        record = journal.find(request_id)
        if record is None:
            raise _unknown(request_id, journal, headers)
        return answer(record)


def _limit(given: str | None) -> int:
    if given is None:
        return _SHOWN
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and int(given) > 0):
        raise invalid(f"limit is {given!r:.100}, which is no number from 1 on", "limit")
    return int(given)


def _unknown(request_id: str, journal: Journal, headers: dict[str, str]) -> ApiError:
    elsewhere = journal.front_end_of(request_id)
    if elsewhere not in (None, journal.front_end):
        message = (
            f"{request_id} is in the journal of {elsewhere}, unless that is gone; this is {journal.front_end}, "
            "which keeps only its own"
        )
        return ApiError(ErrorCode.OTHER_FRONT_END, message, param="request_id", headers=headers)
    kept = f"what runs, the last {journal.kept} that ended, and the last {journal.kept_refused} that were refused"
    message = f"{request_id:.100} is not in the journal of {journal.front_end}, which keeps {kept}"
    return ApiError(ErrorCode.REQUEST_NOT_FOUND, message, param="request_id", headers=headers)
