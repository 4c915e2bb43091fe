"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: a model's tokenizer for clients that have none."""

from typing import Any

from cluster.openai.errors import invalid
from cluster.openai.prompts import Prompt
from cluster.openai.protocol import DetokenizeBody, TokenizeBody
from cluster.openai.sampling import check_model
from cluster.openai.serving import Serving
from cluster.openai.tools import for_template, usable_tools


async def tokenize(body: TokenizeBody, serving: Serving) -> dict[str, Any]:
    """Return the token ids that a completion of the prompt, or a chat of the messages, would begin with."""
    check_model(body.model, serving.model)
    prompt = await _prompt(body, serving)
    answer: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": serving.model.max_model_len,
        "tokens": prompt.token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [serving.tokenizer.token_text(token_id) for token_id in prompt.token_ids]
    return answer


def detokenize(body: DetokenizeBody, serving: Serving) -> dict[str, Any]:
    """Return the text of token ids, special tokens included."""
    check_model(body.model, serving.model)
    if len(body.tokens) > serving.model.max_model_len:
        raise invalid(
            f"tokens has {len(body.tokens)} entries; at most {serving.model.max_model_len} are allowed (max_model_len)",
            "tokens",
        )
    for token_id in body.tokens:
        if token_id >= serving.model.vocab_size:
            raise invalid(
                f"tokens: {token_id} is not in the model's vocabulary of {serving.model.vocab_size}", "tokens"
            )
    return {"prompt": serving.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def tokenizer_info(serving: Serving) -> dict[str, Any]:
    """Return what clients need that write prompts themselves, under its names in tokenizer_config.json."""
    config = serving.tokenizer.config
    return {
        **config.special_tokens,
        "model_max_length": serving.model.max_model_len,
        "chat_template": config.chat_template,
    }


async def _prompt(body: TokenizeBody, serving: Serving) -> Prompt:
    if body.messages is not None:
        return await serving.prompts.of_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
            tools=for_template(usable_tools(body.tools, None)) or None,
        )
    return await serving.prompts.of_text(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
