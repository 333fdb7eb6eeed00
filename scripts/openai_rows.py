"""What of OpenAI's and of Anthropic's reference works, row by row, each with a test that shows it: for
docs/reference/HTTP.md."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """What works of OpenAI's reference, and the test that shows it. Libraries that speak it are run by
`scripts/openai_clients.py`, command lines by `scripts/client_commands.py`, vLLM's own tests of its server by
`scripts/vllm_server_tests.py`."""
ANTHROPIC_HEAD = """What works of Anthropic's reference
([what is different](../guides/CLIENTS.md#anthropics-messages-api)), and the test that shows it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that a reference describes."""

    what: str
    works: str
    """``yes``, ``no``, or what is different."""
    test: str
    """``file::function``, below ``tests``."""


_OPENAI, _EXTRAS = "process/api/test_openai.py", "process/api/test_vllm_extras.py"
_RESPONSES, _REASONING = "process/api/test_responses.py", "process/api/test_reasoning.py"
_BATCHES = "process/api/test_batches.py"
_CLIENTS = "process/test_openai_clients.py"

ROWS = (
    Row("`POST /v1/chat/completions`", "yes", f"{_OPENAI}::test_chat"),
    Row("`stream`", "yes", f"{_OPENAI}::test_chat_stream_has_openais_order"),
    Row("`stream_options.include_usage`", "yes", f"{_OPENAI}::test_chat_stream_without_usage_does_not_mention_it"),
    Row("roles, text parts, developer messages", "yes",
        f"{_OPENAI}::test_chat_accepts_text_parts_developer_role_resent_answers"),
    Row("`logprobs`, `top_logprobs`", "yes", f"{_OPENAI}::test_chat_logprobs"),
    Row("`logprobs` of a stream", "yes", f"{_OPENAI}::test_streamed_logprobs_equal_whole_ones"),
    Row("`bytes` of tokens that are part of a character", "yes",
        f"{_OPENAI}::test_a_token_that_is_part_of_a_character_has_exact_bytes"),
    Row("`n`, `seed`, `temperature`, `top_p`, penalties, `logit_bias`", "yes",
        f"{_OPENAI}::test_every_parameter_reaches_the_engine"),
    Row("`stop`", "yes, up to 32", f"{_OPENAI}::test_stop_strings_over_token_borders"),
    Row("`max_completion_tokens`, `max_tokens`", "yes",
        "process/api/test_first_hour.py::test_a_chat_without_max_tokens_ends_at_the_servers_bound"),
    Row("`tools`, `tool_choice`, streamed calls", "yes", f"{_EXTRAS}::test_calls_are_parsed_whole_and_streamed"),
    Row("`parallel_tool_calls`", "yes",
        "unit/api/test_parse.py::test_required_call_schema_has_definitions_at_root"),
    Row("results of tools in the history", "yes",
        "process/api/test_messages.py::test_the_official_clients_history_is_answered"),
    Row("`response_format`: `json_schema`, `json_object`", "yes",
        "unit/api/test_structure.py::test_formats_of_openai"),
    Row("`response_format` into classes (`parse`), by the official client and by frameworks", "yes",
        f"{_CLIENTS}::test_the_examples_of_a_library_work"),
    Row("`reasoning_effort`", "a variable of the chat template",
        f"{_REASONING}::test_an_effort_is_a_variable_of_the_template"),
    Row("reasoning in answers", "`reasoning_content`, whole and streamed",
        f"{_REASONING}::test_thoughts_are_reported_apart_from_the_answer"),
    Row("reasoning in the history", "`reasoning_content`",
        f"{_REASONING}::test_thoughts_of_earlier_answers_reach_the_template"),
    Row("`completion_tokens_details.reasoning_tokens`", "yes",
        f"{_REASONING}::test_thoughts_are_reported_apart_from_the_answer"),
    Row("`prompt_tokens_details.cached_tokens`", "yes", f"{_OPENAI}::test_cached_tokens_are_reported"),
    Row("`prompt_cache_key`", "yes",
        "process/api/test_documents.py::test_sessions_reach_the_engine"),
    Row("images, audio, files in messages", "no: 400 that names them",
        f"{_REASONING}::test_non_text_content_is_refused_by_name"),
    Row("fields that are unknown", "400 that names them", "process/api/test_hostile.py::test_hostile_request"),
    Row("`POST /v1/completions`", "yes", f"{_OPENAI}::test_completion"),
    Row("prompts as texts, token ids, lists of them", "yes", f"{_OPENAI}::test_prompt_forms"),
    Row("`echo`, `logprobs`", "yes", f"{_OPENAI}::test_echo_and_logprobs"),
    Row("`best_of`", "yes", f"{_OPENAI}::test_best_of_returns_the_likeliest"),
    Row("`suffix`", "no: 400", "process/api/test_hostile.py::test_hostile_request"),
    Row("`POST /v1/responses`", "yes", f"{_RESPONSES}::test_response_is_created_stored_and_deleted"),
    Row("`GET`, `DELETE /v1/responses/{id}`", "yes", f"{_RESPONSES}::test_response_is_created_stored_and_deleted"),
    Row("`previous_response_id`", "yes; its KV is kept",
        f"{_RESPONSES}::test_a_response_is_continued_without_its_instructions"),
    Row("`store: false`", "yes", f"{_RESPONSES}::test_unstored_response_is_not_found"),
    Row("events of a streamed response", "yes", f"{_RESPONSES}::test_streamed_response_equals_the_whole_response"),
    Row("function calls as items", "yes", f"{_RESPONSES}::test_calls_are_items_whole_and_streamed"),
    Row("`background`, cancel", "yes", f"{_RESPONSES}::test_a_response_in_the_background_is_read_later_or_cancelled"),
    Row("items of reasoning", "yes", f"{_REASONING}::test_responses_have_an_item_of_reasoning"),
    Row("tools that a server runs (web search, files, code)", "no: 400",
        f"{_RESPONSES}::test_bad_input_is_refused_by_its_name"),
    Row("`GET /v1/models`, `GET /v1/models/{id}`", "yes", f"{_OPENAI}::test_models_health_and_metrics"),
    Row("fine-tuned models by name", "LoRA adapters (`--lora NAME=FOLDER`)",
        "process/api/test_adapters.py::test_adapter_is_served_as_a_model_and_named_in_answers"),
    Row("errors as OpenAI's client reads them", "yes",
        "process/api/test_lifecycle.py::test_mid_stream_error_reaches_openai_client"),
    Row("keys", "yes; each stands for a tenant",
        "process/api/test_lifecycle.py::test_keys_are_asked_for_and_stand_for_tenants"),
    Row("`POST /v1/embeddings`", "yes, where the model embeds; texts and token ids",
        "process/api/test_embeddings.py::test_embeddings_equal_transformers"),
    Row("`/v1/files`", "for batches", f"{_BATCHES}::test_files_are_listed_read_and_deleted"),
    Row("`/v1/batches`", "yes; chats, completions, responses and embeddings",
        f"{_BATCHES}::test_batch_answers_each_request_once"),
    Row("audio, images, moderations, fine-tuning, assistants", "no: 404 that says why",
        f"{_REASONING}::test_paths_of_openai_that_no_model_answers_say_why"),
)  # fmt: skip

_MESSAGES = "process/api/test_anthropic.py"

ANTHROPIC_ROWS = (
    Row("`POST /v1/messages`", "yes", f"{_MESSAGES}::test_a_message_is_answered_with_usage_and_ids"),
    Row("`POST /v1/messages/count_tokens`", "yes", f"{_MESSAGES}::test_tokens_are_counted_as_the_prompt_has_them"),
    Row("`system` as text and blocks, blocks of text, `tool_use`, `tool_result`", "yes",
        f"{_MESSAGES}::test_blocks_become_the_turns_of_a_chat"),
    Row("a last message of the assistant", "continued",
        f"{_MESSAGES}::test_last_message_of_the_assistant_is_continued"),
    Row("images, documents, tools that a server runs", "no: 400 that names them",
        f"{_MESSAGES}::test_bad_input_is_refused_by_its_name"),
    Row("`tools`, calls whole and streamed (`input_json_delta`)", "yes",
        f"{_MESSAGES}::test_calls_are_blocks_whole_and_streamed"),
    Row("`tool_choice`, `disable_parallel_tool_use`", "yes",
        f"{_MESSAGES}::test_a_choice_of_tools_reaches_the_engine"),
    Row("`stop_sequences`, `stop_reason`, `stop_sequence`", "yes", f"{_MESSAGES}::test_a_stop_sequence_is_named"),
    Row("`max_tokens: 0`", "yes", f"{_MESSAGES}::test_max_tokens_zero_fills_the_cache_and_answers_nothing"),
    Row("events of a stream, `ping`", "yes", f"{_MESSAGES}::test_events_come_in_anthropics_order"),
    Row("`messages.stream`, the async client", "yes", f"{_MESSAGES}::test_async_client_gets_the_same_answer"),
    Row("`thinking`, blocks of it, `thinking_delta`", "yes, for models that think",
        f"{_REASONING}::test_thoughts_are_blocks_of_a_message"),
    Row("`cache_control`, 5 minutes and 1 hour", "yes", f"{_MESSAGES}::test_marked_blocks_are_kept_for_their_time"),
    Row("`cache_read_input_tokens`, `cache_creation_input_tokens`", "yes",
        f"{_MESSAGES}::test_cached_tokens_are_no_input_tokens"),
    Row("`output_config.format`", "yes", f"{_MESSAGES}::test_a_form_of_the_answer_reaches_the_engine"),
    Row("errors, `request-id`, `x-api-key`", "yes", f"{_MESSAGES}::test_errors_become_the_clients_exceptions"),
    Row("`metadata`, `service_tier`, `budget_tokens`", "no effect: `x-memserve-ignored` names them",
        f"{_MESSAGES}::test_fields_that_promise_nothing_are_named"),
)  # fmt: skip
