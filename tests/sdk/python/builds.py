"""Templates built step by step, what sandboxes made from them begin with, and builds that fail."""

import os
import tempfile

from common import Sandbox, raises, sandbox
from e2b import BuildException, Template, TemplateException, wait_for_file

NAME = f"built-{os.getpid()}"
FAILING = f"failing-{os.getpid()}"

with tempfile.TemporaryDirectory() as context:
    os.makedirs(f"{context}/app/inner")
    for path, text in [("app/tool", "#!/bin/sh\necho tool\n"), ("app/inner/note", "copied\n")]:
        with open(f"{context}/{path}", "w") as file:
            file.write(text)
    template = (
        Template(file_context_path=context)
        .from_template("base")
        .set_envs({"GREETING": "hello", "NUMBER": "1"})
        .copy("app", "/srv/app", user="root", mode=0o755)
        .copy("app/inner/*", "notes/")
        .run_cmd("test $GREETING = hello")
        .run_cmd(["mkdir /srv/work", "chown user: /srv/work"], user="root")
        .set_workdir("/srv/work")
        .run_cmd("pwd > where && id -un > who")
        .set_user("root")
        .set_start_cmd("id -un > /srv/started; exec sleep 1000", wait_for_file("/srv/started"))
    )
    lines = []
    assert Template.exists(NAME) is False
    info = Template.build(template, f"{NAME}:v1", tags=["stable"], on_build_logs=lines.append)
    assert any("RUN test" in line.message for line in lines), lines
    assert Template.exists(NAME) is True

    lines.clear()
    Template.build(template, f"{NAME}:v2", on_build_logs=lines.append)
    assert any("already cached" in line.message for line in lines), "files are uploaded once"

    given = Template.assign_tags(f"{NAME}:v1", ["production"])
    assert (given.build_id, sorted(given.tags)) == (info.build_id, ["production", "stable", "v1"])
    found = {tag.tag: tag.build_id for tag in Template.get_tags(NAME)}
    assert found.pop("v2") not in found.values(), "each build has tags of its own"
    assert found == dict.fromkeys(["production", "stable", "v1"], info.build_id)
    Template.remove_tags(NAME, "production")
    with raises(TemplateException, "only tag"):
        Template.remove_tags(NAME, ["v2"])
    assert sorted(tag.tag for tag in Template.get_tags(NAME)) == ["stable", "v1", "v2"]

try:
    with sandbox(NAME, envs={"NUMBER": "2"}) as made:
        run = lambda command, **options: made.commands.run(command, **options).stdout
        assert run("id -un; pwd; echo $GREETING $NUMBER") == "root\n/srv/work\nhello 2\n"
        assert run("cat where who /srv/started") == "/srv/work\nuser\nroot\n"
        assert run("/srv/app/tool; stat -c '%U %a' /srv/app/tool") == "tool\nroot 755\n"
        assert made.files.read("/home/user/notes/note") == "copied\n"
        assert run("pgrep -c -x sleep") == "1\n", "what was started runs"
        assert run("id -un", user="user") == "user\n"

    with raises(BuildException, "no luck"):
        Template.build(Template().from_template(NAME).run_cmd("echo no luck; exit 3"), FAILING)
    with raises(BuildException, "OCI images"):
        Template.build(Template().from_image("debian:12").run_cmd("true"), FAILING)
    assert Template.exists(FAILING) is False
finally:
    for tag in ("v1", "v2"):
        Sandbox.delete_snapshot(f"{NAME}:{tag}")
assert Template.exists(NAME) is False
