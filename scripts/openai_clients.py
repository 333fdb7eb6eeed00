"""Examples of libraries that speak OpenAI's or Anthropic's API, run against a memserve with the bundled model.

    .venv/bin/python scripts/openai_clients.py [--python PYTHON] [--json FILE] [LIBRARY ...]

PYTHON: one that has the libraries (``pip install openai anthropic litellm langchain-openai langchain-anthropic
llama-index-llms-openai-like instructor "pydantic-ai-slim[openai,anthropic]" openai-agents`` in a virtual environment
of its own); default: this one. Libraries that are
missing are skipped and named. The examples are those of the libraries' first pages: structured output into a class,
tools that are called, run and answered, streams. A model of 135 million parameters cannot be relied on to choose a
tool, so the examples demand a call where the library can; what is checked is what the libraries check: types, ids,
arguments.

Printed: a table of library, version, examples that worked. The exit status is 1 after a failure, 0 else.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-example"
ANSWER_TOKENS = 160
TIMEOUT_S = 120.0
RUN_S = 900.0
WEATHER = {"Rome": "sunny, 31 degrees", "Oslo": "rain, 9 degrees"}
ASKED = "What is the weather in Rome?"
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string", "enum": list(WEATHER)}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": SCHEMA}}


def weather_class() -> Any:
    """What the structured answers are read into."""
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        """The weather of a city."""

        city: Literal["Rome", "Oslo"]
        degrees: int = Field(ge=-40, le=50)
        words: list[Literal["sunny", "rain", "wind", "snow"]] = Field(min_length=1, max_length=3)

    return Weather


# -- the official client


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=TIMEOUT_S, max_retries=0)


def openai_chat_and_stream(url: str, model: str) -> None:
    client, messages = _openai(url), [{"role": "user", "content": ASKED}]
    request = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def openai_parse(url: str, model: str) -> None:
    kind, messages = weather_class(), [{"role": "user", "content": ASKED}]
    request = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS}
    parsed = _openai(url).chat.completions.parse(**request, response_format=kind)
    assert isinstance(parsed.choices[0].message.parsed, kind)
    with _openai(url).chat.completions.stream(**request, response_format=kind) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, kind)


def openai_tools(url: str, model: str) -> None:
    client, messages = _openai(url), [{"role": "user", "content": ASKED}]
    request: Any = {"model": model, "max_tokens": ANSWER_TOKENS, "tools": [TOOL]}
    choice = client.chat.completions.create(**request, messages=messages, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": WEATHER[json.loads(call.function.arguments)["city"]]}
        for call in choice.message.tool_calls
    ]
    after = [*messages, choice.message, *results]
    assert client.chat.completions.create(**request, messages=after, tool_choice="none").choices[0].message.content


def openai_responses(url: str, model: str) -> None:
    client, kind = _openai(url), weather_class()
    parsed = client.responses.parse(model=model, input=ASKED, text_format=kind, max_output_tokens=ANSWER_TOKENS)
    assert isinstance(parsed.output_parsed, kind)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    called = client.responses.create(
        model=model, input=ASKED, tools=[tool], tool_choice="required", max_output_tokens=ANSWER_TOKENS
    )
    (call, *_) = [item for item in called.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER["Rome"]}
    inputs: Any = [result]
    more = client.responses.create(model=model, input=inputs, previous_response_id=called.id, max_output_tokens=24)
    assert more.output_text


# -- LangChain


def _langchain(url: str, model: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_tokens=ANSWER_TOKENS, max_retries=0, **more)


def langchain_structured(url: str, model: str) -> None:
    kind = weather_class()
    for method in ("json_schema", "function_calling"):
        answer = _langchain(url, model).with_structured_output(kind, method=method).invoke(ASKED)
        assert isinstance(answer, kind), method


def langchain_tools(url: str, model: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    @tool
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """Weather now."""
        return WEATHER[city]

    messages: list[Any] = [HumanMessage(ASKED)]
    message = _langchain(url, model).bind_tools([get_weather], tool_choice="any").invoke(messages)
    assert message.tool_calls
    messages += [message, *(get_weather.invoke(call) for call in message.tool_calls)]
    assert _langchain(url, model).invoke(messages).content


def langchain_streams(url: str, model: str) -> None:
    chunks = list(_langchain(url, model, stream_usage=True).stream(ASKED))
    assert len(chunks) > 2 and sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)


def langchain_responses(url: str, model: str) -> None:
    llm = _langchain(url, model, use_responses_api=True, output_version="responses/v1")
    assert llm.invoke(ASKED).text
    assert isinstance(llm.with_structured_output(kind := weather_class()).invoke(ASKED), kind)


# -- LlamaIndex


def _llama_index(url: str, model: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=model, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        max_tokens=ANSWER_TOKENS, max_retries=0, timeout=TIMEOUT_S, context_window=2048,
    )  # fmt: skip


def llama_index_chat(url: str, model: str) -> None:
    from llama_index.core.llms import ChatMessage

    llm, messages = _llama_index(url, model), [ChatMessage(role="user", content=ASKED)]
    assert llm.chat(messages).message.content and "".join(part.delta or "" for part in llm.stream_chat(messages))


def llama_index_structured(url: str, model: str) -> None:
    from llama_index.core.prompts import PromptTemplate

    kind = weather_class()
    answer = _llama_index(url, model).structured_predict(kind, PromptTemplate("The weather in {city}."), city="Rome")
    assert isinstance(answer, kind)


def llama_index_tools(url: str, model: str) -> None:
    from llama_index.core.tools import FunctionTool

    def get_weather(city: str) -> str:
        """Weather now."""
        return WEATHER[city]

    get_weather.__annotations__["city"] = Literal["Rome", "Oslo"]  # the class, not its name: it is looked up elsewhere
    tool, llm = FunctionTool.from_defaults(get_weather), _llama_index(url, model)
    answer = llm.chat_with_tools([tool], user_msg=ASKED, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls and all(call.tool_name == "get_weather" and call.tool_kwargs["city"] in WEATHER for call in calls)
    assert llm.predict_and_call([tool], user_msg=ASKED, tool_required=True).response in WEATHER.values()


# -- instructor


def _instructor(mode: str) -> Callable[[str, str], None]:
    def example(url: str, model: str) -> None:
        import instructor

        kind, client = weather_class(), instructor.from_openai(_openai(url), mode=getattr(instructor.Mode, mode))
        request: Any = {"model": model, "messages": [{"role": "user", "content": ASKED}], "max_tokens": ANSWER_TOKENS}
        assert isinstance(client.chat.completions.create(response_model=kind, max_retries=0, **request), kind)

    example.__name__ = f"instructor_{mode.lower()}"
    return example


# -- pydantic-ai


def _pydantic_agent(url: str, model: str, **more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    settings = {"max_tokens": ANSWER_TOKENS}
    return Agent(OpenAIChatModel(model, provider=provider), model_settings=settings, **more)


def pydantic_ai_outputs(url: str, model: str) -> None:
    from pydantic_ai import NativeOutput, ToolOutput

    kind = weather_class()
    for output in (NativeOutput(kind), ToolOutput(kind)):
        assert isinstance(_pydantic_agent(url, model, output_type=output).run_sync(ASKED).output, kind)


def pydantic_ai_streams(url: str, model: str) -> None:
    async def streamed() -> str:
        async with _pydantic_agent(url, model).run_stream(ASKED) as answer:
            return "".join([text async for text in answer.stream_text(delta=True)])

    assert asyncio.run(streamed())


# -- OpenAI's Agents SDK


def _agents(kind_of_model: str) -> Callable[[str, str], None]:
    def example(url: str, model: str) -> None:
        import agents
        import openai

        agents.set_tracing_disabled(True)
        called: list[str] = []

        @agents.function_tool
        def get_weather(city: Literal["Rome", "Oslo"]) -> str:
            """Weather now."""
            called.append(city)
            return WEATHER[city]

        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
        served = getattr(agents, kind_of_model)(model=model, openai_client=client)
        settings = agents.ModelSettings(tool_choice="required", max_tokens=ANSWER_TOKENS)
        agent = agents.Agent(name="Weather", model=served, tools=[get_weather], model_settings=settings)
        agent.tool_use_behavior = "stop_on_first_tool"
        assert agents.Runner.run_sync(agent, ASKED).final_output in WEATHER.values() and called
        kind = weather_class()
        settings = agents.ModelSettings(max_tokens=ANSWER_TOKENS)
        agent = agents.Agent(name="Weather", model=served, output_type=kind, model_settings=settings)
        assert isinstance(agents.Runner.run_sync(agent, ASKED).final_output, kind)

    example.__name__ = f"agents_{kind_of_model.removeprefix('OpenAI').removesuffix('Model').lower()}"
    return example


# -- Anthropic's official client


def _anthropic(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)


def anthropic_message_and_stream(url: str, model: str) -> None:
    client, messages = _anthropic(url), [{"role": "user", "content": ASKED}]
    request: Any = {"model": model, "messages": messages, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text and streamed.usage.output_tokens == whole.usage.output_tokens
    usage, counted = streamed.usage, client.messages.count_tokens(model=model, messages=messages).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted


def anthropic_async(url: str, model: str) -> None:
    import anthropic

    async def answered() -> str:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": ASKED}]
            async with client.messages.stream(model=model, messages=messages, max_tokens=24) as stream:
                return await stream.get_final_text()

    assert asyncio.run(answered())


def anthropic_tools(url: str, model: str) -> None:
    client, messages = _anthropic(url), [{"role": "user", "content": ASKED}]
    tool = {"name": "get_weather", "description": "Weather now", "input_schema": SCHEMA}
    request: Any = {"model": model, "max_tokens": ANSWER_TOKENS, "tools": [tool]}
    message = client.messages.create(**request, messages=messages, tool_choice={"type": "any"})
    assert message.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": WEATHER[block.input["city"]]}
        for block in message.content
        if block.type == "tool_use"
    ]
    turns = [*messages, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert client.messages.create(**request, messages=turns, tool_choice={"type": "none"}).content[0].text


def anthropic_kept_prefix(url: str, model: str) -> None:
    book = {"type": "text", "text": "Rome is sunny. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [{"role": "user", "content": ASKED}]
    request: Any = {"model": model, "messages": messages, "max_tokens": 4, "system": [book]}
    first, again = (_anthropic(url).messages.create(**request).usage for _ in range(2))
    assert first.cache_creation_input_tokens + first.cache_read_input_tokens > 100
    assert again.cache_read_input_tokens > 100 and again.cache_creation_input_tokens < 32


def anthropic_errors(url: str, model: str) -> None:
    import anthropic

    request: Any = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 4}
    changes = (({"model": "nothing-like-it"}, anthropic.NotFoundError), ({"tools": 3}, anthropic.BadRequestError))
    for change, error in changes:
        try:
            _anthropic(url).messages.create(**{"model": model, **request, **change})
        except error as refused:
            assert refused.request_id and refused.body["type"] == "error"
        else:
            raise AssertionError(f"{change} was answered")


# -- LangChain, instructor and pydantic-ai by Anthropic's API


def _langchain_anthropic(url: str, model: str) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=model, base_url=url, api_key=KEY, max_tokens=ANSWER_TOKENS, max_retries=0)


def langchain_anthropic_streams(url: str, model: str) -> None:
    chunks = list(_langchain_anthropic(url, model).stream(ASKED))
    assert len(chunks) > 2 and sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)


def langchain_anthropic_structured(url: str, model: str) -> None:
    kind = weather_class()
    assert isinstance(_langchain_anthropic(url, model).with_structured_output(kind).invoke(ASKED), kind)


def instructor_anthropic(url: str, model: str) -> None:
    import instructor

    kind = weather_class()
    client = instructor.from_anthropic(_anthropic(url), mode=instructor.Mode.TOOLS)
    request: Any = {"model": model, "messages": [{"role": "user", "content": ASKED}], "max_tokens": ANSWER_TOKENS}
    assert isinstance(client.messages.create(response_model=kind, max_retries=0, **request), kind)


def pydantic_ai_anthropic(url: str, model: str) -> None:
    import anthropic
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = anthropic.AsyncAnthropic(base_url=url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
    served = AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client))
    kind = weather_class()
    agent = Agent(served, model_settings={"max_tokens": ANSWER_TOKENS}, output_type=ToolOutput(kind))
    assert isinstance(agent.run_sync(ASKED).output, kind)


# -- litellm


def _litellm(provider: str) -> Callable[[str, str], None]:
    def example(url: str, model: str) -> None:
        import litellm

        base = url if provider == "anthropic" else f"{url}/v1"
        request: Any = {"model": f"{provider}/{model}", "api_base": base, "api_key": KEY, "num_retries": 0}
        messages = [{"role": "user", "content": ASKED}]
        whole = litellm.completion(**request, messages=messages, max_tokens=16)
        chunks = list(litellm.completion(**request, messages=messages, max_tokens=16, stream=True))
        assert whole.choices[0].message.content and len(chunks) > 2
        called = litellm.completion(
            **request, messages=messages, max_tokens=ANSWER_TOKENS, tools=[TOOL], tool_choice="required"
        ).choices[0]
        (call, *_) = called.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in WEATHER and called.finish_reason == "tool_calls"

    example.__name__ = f"litellm_{provider}"
    return example


Example = Callable[[str, str], None]
EXAMPLES: dict[str, tuple[str, tuple[Example, ...]]] = {
    "anthropic": (
        "anthropic", (
            anthropic_message_and_stream, anthropic_async, anthropic_tools, anthropic_kept_prefix, anthropic_errors,
        ),
    ),
    "langchain-anthropic": (
        "langchain_anthropic", (langchain_anthropic_streams, langchain_anthropic_structured),
    ),
    "litellm": ("litellm", tuple(map(_litellm, ("openai", "anthropic")))),
    "openai": ("openai", (openai_chat_and_stream, openai_parse, openai_tools, openai_responses)),
    "langchain-openai": (
        "langchain_openai", (langchain_structured, langchain_tools, langchain_streams, langchain_responses),
    ),
    "llama-index-llms-openai-like": (
        "llama_index.llms.openai_like", (llama_index_chat, llama_index_structured, llama_index_tools),
    ),
    "instructor": (
        "instructor",
        (*map(_instructor, ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")), instructor_anthropic),
    ),
    "pydantic-ai-slim": ("pydantic_ai", (pydantic_ai_outputs, pydantic_ai_streams, pydantic_ai_anthropic)),
    "openai-agents": ("agents", tuple(map(_agents, ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")))),
}  # fmt: skip
"""Distribution -> the module that it is imported as, and its examples."""


def run_one(url: str, model: str, library: str) -> dict[str, Any]:
    """In this process: the examples of one library, each with an error or none."""
    module, examples = EXAMPLES[library]
    try:
        __import__(module)
    except ImportError as error:
        return {"library": library, "missing": str(error)}
    report: dict[str, Any] = {"library": library, "version": importlib.metadata.version(library), "examples": {}}
    for example in examples:
        begun_s = time.perf_counter()
        try:
            example(url, model)
            error = ""
        except Exception:  # whatever a library raises is the finding
            error = traceback.format_exc()
        report["examples"][example.__name__] = {"error": error, "s": round(time.perf_counter() - begun_s, 2)}
    return report


def run_in(python: str, url: str, model: str, library: str) -> dict[str, Any]:
    """In a process of ``python``: what :func:`run_one` returns there."""
    command = [python, str(Path(__file__)), "--against", url, "--model", model, library]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    library_run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    lines = library_run.stdout.strip().splitlines()
    if library_run.returncode or not lines:
        return {"library": library, "missing": f"{python} cannot run the examples: {library_run.stderr[-300:]}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| library | version | examples | failed |", "| --- | --- | --- | --- |"]
    for report in results:
        if "missing" not in report:
            failed = [name for name, example in report["examples"].items() if example["error"]]
            lines.append(
                f"| {report['library']} | {report['version']} | {len(report['examples'])} | {', '.join(failed)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python with the libraries")
    parser.add_argument("--against", help="the address of a server that runs already")
    parser.add_argument("--model", help="its model's name; with --against")
    parser.add_argument("--json", type=Path)
    parser.add_argument("libraries", nargs="*", choices=[*EXAMPLES, []], help="instead of all")
    options = parser.parse_args()
    libraries = options.libraries or list(EXAMPLES)
    if options.against:
        for library in libraries:
            print(json.dumps(run_one(options.against, options.model, library)))
        return
    sys.path.insert(0, str(ROOT / "bench"))
    from harness.processes import end_in_order
    from harness.served import serving

    end_in_order()
    with serving("--metadata", "none") as served:
        results = [run_in(options.python, served.url, served.model, library) for library in libraries]
    for report in results:
        if "missing" in report:
            print(f"skipped: {report['library']}: {report['missing']}")
        for name, example in report.get("examples", {}).items():
            if example["error"]:
                print(f"FAILED {name}:\n{example['error']}")
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(example["error"] for report in results for example in report.get("examples", {}).values()))


if __name__ == "__main__":
    main()
