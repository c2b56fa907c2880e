"""An agent loop of a user's own: sessions of one to three outputs.

Each output has a prompt of its own, as where an agent condenses what it has seen before it goes on.
"""

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

MOST = 3


class Pieces(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        (question,) = kwargs.pop("raw_prompt")
        outputs = []
        while True:
            prompt = [{**question, "content": f"{question['content']}{len(outputs)}"}]
            outputs.append(await super().run(sampling_params, raw_prompt=prompt, **kwargs))
            # A random model goes on in half of the cases.
            if len(outputs) == MOST or outputs[-1].response_ids[0] % 2:
                return outputs
