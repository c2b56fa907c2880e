"""Loaded into a run by VERL_USE_EXTERNAL_MODULES: answers that end too soon, as from a server that aborts requests.

Of 16 sessions one has an empty first turn, one a first turn of one token, and two an empty second turn.
"""

from collections import Counter

import wrapt

_sessions: dict[str, int] = {}
_turns: Counter[str] = Counter()


def _cut_short(llm_server) -> None:
    client = llm_server.LLMServerClient
    generate = client.generate

    async def generate_less(self, request_id, **kwargs):
        session = _sessions.setdefault(request_id, len(_sessions)) % 16
        _turns[request_id] += 1
        output = await generate(self, request_id, **kwargs)
        keep = {(3, 1): 0, (7, 1): 1, (0, 2): 0, (8, 2): 0}.get((session, _turns[request_id]))
        output.token_ids, output.log_probs = output.token_ids[:keep], output.log_probs[:keep]
        return output

    client.generate = generate_less


wrapt.register_post_import_hook(_cut_short, "verl.workers.rollout.llm_server")
