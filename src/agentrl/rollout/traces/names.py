"""The names of attributes in traces: all that are sent.

Those of OpenTelemetry's semantic conventions for generative AI are pinned here, because the
conventions still change: what people have set up for a name goes on working. They are the names of
semantic conventions 1.44 (`opentelemetry-semantic-conventions` 0.66b2), which a test compares.

OpenInference has names for what those have no name for: that a span judges, and what a trace as a
whole was asked and answered, as text. Phoenix shows these in its lists of traces and sessions.
"""

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
CONVERSATION = "gen_ai.conversation.id"
AGENT = "gen_ai.agent.name"
INPUT = "gen_ai.input.messages"
OUTPUT = "gen_ai.output.messages"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TOOL = "gen_ai.tool.name"
ARGUMENTS = "gen_ai.tool.call.arguments"
RESULT = "gen_ai.tool.call.result"
SCORER = "gen_ai.evaluation.name"
SCORE = "gen_ai.evaluation.score.value"
EXPLANATION = "gen_ai.evaluation.explanation"

SCORED_EVENT = "gen_ai.evaluation.result"
INVOKE_AGENT = "invoke_agent"
CHAT = "chat"
EXECUTE_TOOL = "execute_tool"
SCORING = "score"  # the conventions have no operation for it, and let others have names

ERROR_TYPE = "error.type"
SESSION = "session.id"

KIND = "openinference.span.kind"
EVALUATOR = "EVALUATOR"
INPUT_TEXT = "input.value"
OUTPUT_TEXT = "output.value"

OWN = "agentrl."  # prefix of all others
