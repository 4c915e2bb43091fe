"""``crosskv chat``: a conversation with a running server.

A ``Conversation`` keeps the history that every further question is asked with; it ends with the command.
"""

from rich.console import Console
from rich.markup import escape

from cluster.client import ApiClient, ApiError, ChatAnswer, Message


class Conversation:
    """Questions and answers so far, and how to ask the next one."""

    def __init__(
        self,
        client: ApiClient,
        model: str,
        *,
        system: str | None = None,
        max_tokens: int = 512,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.history: list[Message] = [] if system is None else [Message(role="system", content=system)]
        self._client = client
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed

    def ask(self, question: str, console: Console) -> ChatAnswer:
        """Ask, print the answer as it arrives, and remember both. A question that fails is not remembered."""
        messages = [*self.history, Message(role="user", content=question)]
        try:
            answer = self._client.chat(
                self.model,
                messages,
                # The text is the model's: not markup, and not to be wrapped piece by piece.
                lambda text: console.out(text, end="", highlight=False),
                max_tokens=self._max_tokens,
                temperature=self._temperature,
                seed=self._seed,
            )
        finally:
            console.out("")
        self.history = [*messages, Message(role="assistant", content=answer.text)]
        return answer


def converse(conversation: Conversation, console: Console) -> None:
    """Ask what the person types until they end the input."""
    console.print(f"[dim]Talking to {escape(conversation.model)}. Ctrl-D ends, /reset starts anew.[/dim]")
    beginning = list(conversation.history)
    while True:
        try:
            question = console.input("[bold cyan]you>[/bold cyan] ").strip()
        except EOFError:
            console.out("")
            return
        if question == "/reset":
            conversation.history = list(beginning)
        elif question:
            try:
                conversation.ask(question, console)
            except ApiError as error:
                # One failed question, for example too long a one, does not end the conversation.
                console.print(f"[red]error: {escape(str(error))}[/red]")
