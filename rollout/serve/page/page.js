// The page of the server: send a video, ask about it, and watch the episode while it plays.
// A question owns its card and its lanes on the timeline. What the server streams only adds to
// them, so a question can be closed and opened again at any time, also while it runs.

const UNREACHABLE = "The server does not answer. See whether it still runs, then try again.";
const CUT = "The connection ended before the answer came. Ask again.";
/** What a stop reason means for a question that has no answer. */
const ENDINGS = {
  no_answer: "The model stopped without an answer.",
  truncated: "No answer: a turn reached its length limit.",
  turn_limit: "No answer: the model wanted to look again after its last turn.",
  token_limit: "No answer: there was no room for further reports.",
  time_limit: "No answer: the time was up.",
};
const COLUMNS = 240; // of a lane
const FINGER = 28; // pixels of the narrowest bar: a finger has to hit it

const $ = (id) => document.getElementById(id);
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const clone = (id) => $(`${id}-template`).content.firstElementChild.cloneNode(true);
let model; // promise of its name
let video = null; // on the stage: {file, url, playable, sent (promise of an id), fraction, info, error}

/** Seconds as a clock shows them: 96.5 is 1:36.5. */
function clock(seconds) {
  const tenths = Math.round(seconds * 10);
  const rest = (tenths % 600) / 10;
  return `${Math.floor(tenths / 600)}:${rest < 10 ? "0" : ""}${rest}`;
}

const span = ({ start, end }) => `${clock(start)} – ${clock(end)}`;

/** Have a screen reader say something, after what it is saying. */
const announce = (text) => $("log").append(make("p", { textContent: text }));

// ---- The server

let asking = null; // the dialog's promise: requests that are refused meanwhile wait for the same key

/** Ask for the API key, which is kept until the tab closes. Fails if the user cancels. */
function askForKey() {
  const dialog = $("keys");
  const ask = (done, fail) => {
    dialog.onclose = () => {
      asking = null;
      if (dialog.returnValue !== "use") return fail(new Error("This server needs an API key."));
      sessionStorage.setItem("key", $("key").value.trim());
      done();
    };
    $("refused").textContent = sessionStorage.getItem("key") ? "The server refuses the last key." : "";
    $("key").value = "";
    dialog.returnValue = "cancel"; // what Escape leaves
    dialog.showModal();
  };
  return (asking ??= new Promise(ask));
}

/** Call `attempt(headers)` until the reply is no 401. Throws the server's message of a bad reply. */
async function request(attempt) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const reply = await attempt(key ? { Authorization: `Bearer ${key}` } : {});
    if (reply.ok) return reply;
    if (reply.status !== 401) {
      const { error } = await reply.json().catch(() => ({}));
      const message = error?.message ?? `The server answered with status ${reply.status}.`;
      throw Object.assign(new Error(message), { status: reply.status });
    }
    // Another request may have got a new key since this one was sent.
    if (key === sessionStorage.getItem("key")) await askForKey();
  }
}

/** What to tell the user: the messages of fetch itself mean nothing to them. */
const explain = (error) => (error instanceof TypeError ? UNREACHABLE : error.message);

/** The object on each `data:` line of a stream of server-sent events. The last, [DONE], has none. */
async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop(); // only a part of the last line has come
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

/** Wait until the server has compiled its programs, then return the name of its model. */
async function connect() {
  for (;;) {
    const reply = await fetch("ready").catch(() => null);
    if (reply?.ok) break;
    const { status } = (await reply?.json().catch(() => null)) ?? {};
    $("server").textContent = reply ? `not ready: ${status ?? reply.status}` : "no connection";
    await new Promise((done) => setTimeout(done, 1000));
  }
  $("server").textContent = "ready";
  const reply = await request((headers) => fetch("v1/models", { headers }));
  const { id, paravt } = (await reply.json()).data.find((model) => !model.id.endsWith("/plain"));
  $("model").textContent = id;
  $("frames").max = $("frames").value = $("chosen").value = paravt.frames;
  return id;
}

// ---- The video

/** Upload with XMLHttpRequest: fetch does not tell how much has been sent. */
function upload(file, headers, progress) {
  const form = new FormData();
  form.append("purpose", "user_data");
  form.append("file", file);
  const request = new XMLHttpRequest();
  request.open("POST", "v1/files");
  for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
  request.upload.onprogress = ({ loaded, total }) => progress(loaded / total);
  return new Promise((done, fail) => {
    request.onload = () => done(new Response(request.response, { status: request.status }));
    request.onerror = () => fail(new TypeError());
    request.send(form);
  });
}

/** Send a video. `video.sent` becomes the id of the file, or fails. */
function send(video) {
  const progress = (fraction) => drawVideo(Object.assign(video, { fraction }));
  const work = async () => {
    const reply = await request((headers) => upload(video.file, headers, progress));
    const { id, paravt } = await reply.json();
    video.info = paravt;
    return id;
  };
  video.error = null;
  progress(0);
  video.sent = work();
  video.sent.catch((error) => (video.error = error)).finally(() => progress(null));
}

/** Put a video on the stage. */
function put(chosen) {
  video = chosen;
  $("player").src = video.url;
  $("welcome").hidden = true;
  $("desk").hidden = $("another").hidden = false;
  drawVideo(video);
}

/** Take a file, show and send it. */
function choose(file) {
  put({ file, url: URL.createObjectURL(file), playable: true });
  send(video);
  for (const card of $("history").children) card.open = false;
  $("lanes").replaceChildren(row("Overview"));
  $("text").focus();
}

/** Show what is known of a video, if it is the one on the stage. */
function drawVideo(changed) {
  if (changed !== video) return;
  const { file, info, fraction, error, playable } = video;
  const size = info ? [clock(info.duration), `${info.width} × ${info.height}`] : [];
  const sending = fraction === 1 ? "The server reads it" : `Sending: ${Math.floor(100 * fraction)} %`;
  $("about").textContent = [file.name, ...(fraction == null ? size : [sending])].join(" · ");
  $("end").textContent = info ? clock(info.duration) : "";
  $("sending").hidden = fraction == null;
  $("sending").value = fraction ?? 0;
  $("trouble").hidden = !error;
  $("reason").textContent = error ? explain(error) : "";
  $("resend").hidden = [413, 422].includes(error?.status); // it would be refused again
  $("player").hidden = $("playhead").hidden = !playable;
  $("unplayable").hidden = playable || Boolean(error);
}

/** Play a question's video from a time on, or show its reports where nothing can be played. */
function play(question, seconds) {
  if (video !== question.video) show(question);
  question.part("work").open ||= !video.playable;
  $("player").currentTime = seconds;
  $("player").play().catch(() => {}); // another click came first, or the video cannot be played
  $("player").scrollIntoView({ block: "nearest" });
}

// ---- A question: its card, its lanes, its crops

function newQuestion(text, options, frames) {
  const question = { video, text, options, frames, card: clone("card"), lanes: make("div") };
  Object.assign(question, { stopper: new AbortController(), calls: {}, turns: {}, turn: 1, duration: 1 });
  question.part = (name) => question.card.querySelector(`.${name}`);
  question.part("text").textContent = text;
  question.card.ontoggle = () => question.card.open && show(question);
  question.part("stop").onclick = () => question.stopper.abort();
  question.part("again").onclick = () => fill(question).focus();
  question.lanes.append(row("Overview"));
  $("history").prepend(question.card);
  show(question);
  return question;
}

/** Open a question, with its video and its lanes. The browser closes the others: they share a name. */
function show(question) {
  if (video !== question.video) put(question.video);
  question.card.open = true;
  $("lanes").replaceChildren(question.lanes);
}

/** Say in the card what happens. */
function tell(question, text) {
  question.part("state").textContent = question.part("gist").textContent = text;
}

/** A lane of the timeline with its name. */
function row(name) {
  const row = clone("row");
  row.firstChild.textContent = name;
  return row;
}

/** The lane, thought and reports of a turn. */
function turnOf(question, number) {
  question.turn = number;
  if (!question.turns[number]) {
    const lane = row(`Turn ${number}`);
    const section = clone("turn");
    const [title, thought, reports] = section.children;
    title.textContent = `Turn ${number}`;
    question.lanes.append(lane);
    question.part("work").append(section);
    question.turns[number] = { lane: lane.lastChild, thought, reports };
  }
  return question.turns[number];
}

/** The call that an event is about. Its first event adds its report and its bar. */
function callOf(question, { turn: number, call: index, start, end }) {
  const turn = turnOf(question, number);
  const name = Object.keys(question.calls).length + 1; // through all turns, as in the whole episode
  const call = (question.calls[`${number}/${index}`] ??= { name, start, end, tile: clone("report") });
  if (!call.tile.parentElement) {
    const [title, window, status, text] = call.tile.children;
    Object.assign(call, { status, text });
    title.textContent = call.name;
    window.disabled = start == null; // a malformed call has no window
    window.textContent = window.disabled ? "no window" : span(call);
    window.onclick = () => play(question, start);
    turn.reports.append(call.tile);
    if (!window.disabled) turn.lane.append((call.bar = newBar(question, turn.lane, call)));
  }
  return call;
}

/** A crop's bar. The grid of its lane puts it below the bars that it would overlap. */
function newBar(question, lane, { name, start, end }) {
  const narrowest = Math.ceil((COLUMNS * FINGER) / (lane.clientWidth || 320));
  // A refused window may lie outside the video.
  const part = (seconds) => Math.max(0, Math.min(seconds / question.duration, 1));
  const place = (seconds) => Math.round(COLUMNS * part(seconds));
  const width = Math.max(place(end) - place(start), narrowest);
  const left = Math.max(0, Math.min(place(start), COLUMNS - width));
  const bar = make("button", { type: "button", className: "bar", textContent: name });
  bar.style.gridColumn = `${left + 1} / span ${width}`;
  bar.onclick = () => play(question, start);
  return bar;
}

/** Show on bar and report what has become of a crop: looking, done or failed. */
function mark(call, state, words) {
  call.tile.dataset.state = state;
  call.status.textContent = words;
  if (!call.bar) return;
  call.bar.dataset.state = state;
  call.bar.ariaLabel = `Crop ${call.name}, ${span(call)}, ${words}`;
}

/** The span of time that an answer names, which is [start, end] in seconds; null if it names none. */
function spanOf(answer) {
  const found = /^\[([\d.]+), *([\d.]+)\]$/.exec(answer);
  return found && { start: Number(found[1]), end: Number(found[2]), report: "the answer" };
}

/** A lane with the span of time that is the answer. */
function answerLane(question, answered) {
  const lane = row("Answer");
  question.lanes.append(lane);
  const bar = newBar(question, lane.lastChild, { ...answered, name: "" });
  bar.ariaLabel = `Answer, ${span(answered)}`;
  bar.dataset.state = "answer";
  lane.lastChild.append(bar);
}

/** A moment that was looked at, or answered: its frame, its time and what was reported. */
function moment(question, evidence, state) {
  const { start, end, report } = evidence;
  const button = clone("moment");
  button.dataset.state = state;
  const [frame, time, words] = button.children;
  frame.src = `${question.video.url}#t=${(start + end) / 2}`;
  frame.hidden = !question.video.playable;
  time.textContent = span(evidence);
  words.textContent = report;
  button.onclick = () => play(question, start);
  return button;
}

/** Link to the whole episode. A link sends no key: if there is one, fetch the page and save it. */
function linkEpisode(link, href) {
  Object.assign(link, { href, hidden: false });
  const save = async () => {
    const page = await (await request((headers) => fetch(href, { headers }))).blob();
    Object.assign(link, { href: URL.createObjectURL(page), download: "episode.html" }).click();
  };
  link.onclick = (event) => {
    if (!sessionStorage.getItem("key") || link.download) return;
    event.preventDefault();
    save().catch((error) => (link.textContent = explain(error)));
  };
}

// ---- What the server streams

const EVENTS = {
  queued: (question, { place }) =>
    tell(question, place ? `Waits: place ${place} in the queue` : "Reads the video"),
  overview(question, { times, duration }) {
    const ticks = times.map((time) => make("i", { title: clock(time) }));
    ticks.forEach((tick, index) => {
      tick.style.left = `${(100 * times[index]) / duration}%`;
      tick.style.animationDelay = `${(600 * index) / ticks.length}ms`;
    });
    question.lanes.querySelector(".lane").replaceChildren(...ticks);
    question.duration = duration;
    tell(question, `Looks at an overview of ${times.length} frames`);
  },
  turn(question, { turn }) {
    turnOf(question, turn);
    tell(question, "Thinks");
  },
  call(question, event) {
    const call = callOf(question, event);
    mark(call, "looking", "looking");
    const looking = question.lanes.querySelectorAll("[data-state=looking]").length;
    tell(question, looking > 1 ? `${looking} sub-agents look side by side` : "A sub-agent looks");
    announce(`Crop ${call.name} looks at ${span(event)}`);
  },
  "report.delta": (question, event) => callOf(question, event).text.append(event.text),
  report(question, event) {
    const call = callOf(question, event);
    const words = event.status === "executed" ? "reported" : event.status.replaceAll("_", " ");
    call.text.textContent = event.text;
    mark(call, ["executed", "clamped"].includes(event.status) ? "done" : "failed", words);
    announce(`Crop ${call.name}: ${event.text}`);
  },
  answer(question, { answer, option, stop, evidence, episode }) {
    const text = option ?? answer; // answers may name an option by its letter
    const choice = (each) => make("li", { textContent: each, ariaCurrent: String(each === option) });
    const answered = spanOf(text);
    if (answered) answerLane(question, answered);
    question.part("answer").textContent = text ?? "";
    question.part("choices").append(...question.options.map(choice));
    if (answered) question.part("moments").append(moment(question, answered, "answer"));
    question.part("moments").append(...evidence.map((each) => moment(question, each, "done")));
    question.part("work").open = text == null;
    question.ending = text ?? ENDINGS[stop] ?? `No answer: ${stop}`;
    announce(text == null ? question.ending : `Answer: ${text}`);
    if (episode) linkEpisode(question.part("episode"), `v1/episodes/${episode}.html`);
  },
};

/** Take what a chunk of the stream brings. */
function take(question, { choices, paravt, usage, error }) {
  if (error) throw new Error(error.message);
  const { reasoning_content: thought, content } = choices?.[0]?.delta ?? {};
  const place = thought && turnOf(question, question.turn).thought;
  // The server parts the thoughts of turns by empty lines. Here, each has a place of its own.
  if (thought) place.append(place.textContent ? thought : thought.trimStart());
  if (content && !question.ending) question.part("answer").append(content);
  if (paravt) EVENTS[paravt.event]?.(question, paravt);
  if (usage) question.tokens = usage.total_tokens;
}

// ---- Asking

/** Post a question about a file; return the reply before its stream. */
function post({ text, options, frames, stopper }, model, url) {
  const content = [{ type: "video_url", video_url: { url } }, { type: "text", text }];
  const how = { stream: true, stream_options: { include_usage: true } };
  const most = Number($("frames").max); // was not known to a question that waited for the server
  const paravt = { frames: Math.min(frames, most), ...(options.length && { options }) };
  const body = JSON.stringify({ model, messages: [{ role: "user", content }], ...how, paravt });
  return request((key) => {
    const headers = { ...key, "Content-Type": "application/json" };
    return fetch("v1/chat/completions", { method: "POST", headers, body, signal: stopper.signal });
  });
}

/** Ask once the server is ready and the video is sent, and show the episode while it plays. */
async function ask(question) {
  const { video, stopper } = question;
  const stopped = new Promise((_, fail) => (stopper.signal.onabort = () => fail(stopper.signal.reason)));
  const unlessStopped = (promise) => Promise.race([promise, stopped]);
  const began = performance.now();
  try {
    tell(question, "Waits until the server is ready");
    const name = await unlessStopped((model = model.catch(connect)));
    tell(question, "Waits until the video is sent");
    const file = await unlessStopped(video.sent);
    const reply = await post(question, name, file).catch(async (error) => {
      if (error.status !== 404) throw error;
      send(video); // the server deletes uploads after a while
      return post(question, name, await unlessStopped(video.sent));
    });
    for await (const chunk of chunks(reply.body)) take(question, chunk);
    if (!question.ending) throw new Error(CUT);
    tell(question, question.ending);
  } catch (error) {
    const { aborted } = stopper.signal; // then, what is thrown depends on the browser
    question.card.classList.toggle("failed", !aborted);
    tell(question, aborted ? "Stopped." : explain(error));
    announce(question.part("state").textContent);
    if (!$("text").value) fill(question);
  }
  const looking = Object.values(question.calls).filter((call) => call.tile.dataset.state === "looking");
  looking.forEach((call) => mark(call, "failed", "not finished"));
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  const tokens = question.tokens ? ` · ${question.tokens.toLocaleString("en")} tokens` : "";
  question.part("figures").textContent = `${seconds} s${tokens}`;
  question.card.classList.add("ended");
  if (document.activeElement === question.part("stop")) question.part("head").focus();
  question.part("stop").hidden = true;
}

/** Add a line for an answer to choose from; return its field. */
function addOption(text) {
  const line = clone("option");
  line.firstChild.value = text;
  line.lastChild.onclick = () => {
    line.remove();
    $("add").focus();
  };
  $("options").append(line);
  return line.firstChild;
}

/** Put a question into the form; return the field of its text. */
function fill({ text, options, frames }) {
  $("options").replaceChildren();
  options.forEach(addOption);
  $("frames").value = $("chosen").value = frames;
  return Object.assign($("text"), { value: text });
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const options = [...$("options").querySelectorAll("input")].map((input) => input.value.trim());
  const question = newQuestion($("text").value.trim(), options, Number($("frames").value));
  fill({ text: "", options: [], frames: question.frames }).focus();
  ask(question);
};
$("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("add").onclick = () => addOption("").focus();
$("frames").oninput = () => ($("chosen").value = $("frames").value);
$("file").onchange = () => $("file").files.length && choose($("file").files[0]);
$("resend").onclick = () => send(video);
$("player").onerror = () => drawVideo(Object.assign(video, { playable: false }));
$("player").ontimeupdate = ({ target }) => {
  $("playhead").style.left = `${(100 * target.currentTime) / (target.duration || 1)}%`;
};
document.ondragover = (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
};
document.ondragleave = (event) => event.relatedTarget || document.body.classList.remove("dragging");
document.ondrop = (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  if (event.dataTransfer.files.length) choose(event.dataTransfer.files[0]);
};
model = connect();
model.catch((error) => ($("server").textContent = explain(error)));
