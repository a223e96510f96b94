// plumb completion SHELL: what a shell needs to complete commands, options and choices. Everything comes from the
// application itself, as --help does.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>

#include "plumb/cli/commands.h"
#include "plumb/core/join.h"
#include "plumb/core/text.h"
#include "plumb/training/usage.h"

namespace plumb::cli {
namespace {

struct Choice {
  std::vector<std::string> names;  // "-o", "--out"
  std::vector<std::string> values;
  std::string help;
  bool takes_value = false, often = false;
};

// Returns the first sentence, short enough for a line of a menu.
std::string first_sentence(const std::string& text) {
  constexpr size_t kLongest = 90;
  std::string out = text.substr(0, std::min(text.find(". "), text.find('\n')));
  if (out.size() <= kLongest) return out;
  const size_t space = out.rfind(' ', kLongest);
  return out.substr(0, space == std::string::npos ? kLongest : space) + " ...";
}

// "TEXT:{text,table}" has two values.
std::vector<std::string> values_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t begin = type.find('{'), end = type.find('}');
  if (begin == std::string::npos || end == std::string::npos) return {};
  return split_commas(type.substr(begin + 1, end - begin - 1));
}

std::vector<Choice> options_of(const CLI::App& app) {
  std::vector<Choice> out;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->nonpositional()) continue;
    Choice choice{{}, values_of(*option), first_sentence(option->get_description())};
    for (const std::string& name : option->get_snames()) choice.names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) choice.names.push_back("--" + name);
    choice.takes_value = option->get_items_expected_max() > 0;
    choice.often = option->get_items_expected_max() > 1;
    out.push_back(std::move(choice));
  }
  return out;
}

std::string joined(const std::vector<std::string>& words) { return join(words, {}, " "); }

// In single quotes of bash and zsh; `also` gets a backslash.
std::string quoted(const std::string& text, const std::string& also = "") {
  std::string out;
  for (char c : text) {
    if (also.find(c) != std::string::npos) out += '\\';
    out += c == '\'' ? "'\\''" : std::string(1, c);
  }
  return out;
}

std::string fish_quoted(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return "'" + out + "'";
}

// Letters to change, add, leave out or exchange with the next one, to make one word of the other.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t k = 0; k <= b.size(); ++k) {
      if (i == 0 || k == 0) {
        d[i][k] = i + k;
        continue;
      }
      d[i][k] = std::min({d[i - 1][k] + 1, d[i][k - 1] + 1, d[i - 1][k - 1] + (a[i - 1] != b[k - 1])});
      if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1])
        d[i][k] = std::min(d[i][k], d[i - 2][k - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

// Returns the nearest name: one that the word is the start of, else the nearest in spelling; empty if none is near.
std::string nearest_name(const std::string& word, const std::vector<std::string>& names) {
  std::string best;
  size_t least = word.size() / 3 + 2;
  for (const std::string& name : names) {
    const size_t far = name.starts_with(word) && word.size() > 2 ? 1 : word.size() > 64 ? least : distance(word, name);
    if (far < least) least = far, best = name;
  }
  return best;
}

using Apps = std::vector<const CLI::App*>;

std::string names_of(const CLI::App& app) {
  return join(options_of(app), [](const Choice& choice) { return joined(choice.names); }, " ");
}

std::string bash(const CLI::App& app, const Apps& commands) {
  std::string words, values, names;
  for (const CLI::App* command : commands) {
    names += " " + command->get_name();
    words += "    " + command->get_name() + ") words=\"" + names_of(*command) + "\" ;;\n";
    for (const Choice& choice : options_of(*command)) {
      for (const std::string& name : choice.values.empty() ? std::vector<std::string>() : choice.names) {
        values += "    \"" + command->get_name() + " " + name + "\") words=\"" + joined(choice.values) + "\" ;;\n";
      }
    }
  }
  return "# bash completion of plumb: source <(plumb completion bash)\n"
         "_plumb() {\n"
         "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command= words= i\n"
         "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
         "    [[ ${COMP_WORDS[i]} == -* ]] || { command=${COMP_WORDS[i]}; break; }\n"
         "  done\n"
         "  COMPREPLY=()\n"
         "  case \"$command $prev\" in\n" +
         values + "    \"help help\") words=\"" + names.substr(1) +
         "\" ;;\n"
         "    \"completion completion\") words=\"bash zsh fish\" ;;\n"
         "    *) [[ -z $command || $cur == -* ]] && case \"$command\" in\n"
         "    \"\") words=\"" +
         names.substr(1) + " " + names_of(app) + "\" ;;\n" + words +
         "    esac ;;\n"
         "  esac\n"
         "  [[ -z $words ]] || COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
         "}\n"
         "complete -o default -F _plumb plumb\n";
}

std::string zsh(const CLI::App& app, const Apps& commands) {
  auto arguments = [](const CLI::App& of) {
    std::string out;
    for (const Choice& choice : options_of(of)) {
      for (const std::string& name : choice.names) {
        out +=
            " \\\n        '" + std::string(choice.often ? "*" : "") + name + "[" + quoted(choice.help, "[]:\\") + "]";
        if (choice.takes_value)
          out += choice.values.empty() ? ":value:_files" : ":value:(" + joined(choice.values) + ")";
        out += "'";
      }
    }
    return out;
  };
  std::string list, cases, names;
  for (const CLI::App* command : commands) {
    const std::string name = command->get_name();
    names += " " + name;
    list += "    '" + name + ":" + quoted(first_sentence(command->get_description()), ":\\") + "'\n";
    if (name != "help")
      cases += "      " + name + ") _arguments" + arguments(*command) + " \\\n        '*:file:_files' ;;\n";
  }
  return "#compdef plumb\n"
         "# zsh completion of plumb: source <(plumb completion zsh)\n"
         "_plumb() {\n"
         "  local -a commands\n"
         "  commands=(\n" +
         list +
         "  )\n"
         "  if (( CURRENT == 2 )); then\n"
         "    _describe command commands\n"
         "    _arguments" +
         arguments(app) +
         "\n"
         "  else\n"
         "    shift words\n"
         "    (( CURRENT-- ))\n"
         "    case $words[1] in\n"
         "      help) _arguments '1:command:(" +
         names.substr(1) + ")' ;;\n" + cases +
         "    esac\n"
         "  fi\n"
         "}\n"
         "if [[ $funcstack[1] == _plumb ]]; then _plumb \"$@\"; else compdef _plumb plumb; fi\n";
}

std::string fish(const CLI::App& app, const Apps& commands) {
  std::string out = "# fish completion of plumb: plumb completion fish | source\n", names;
  auto options = [&out](const CLI::App& of, const std::string& when) {
    for (const Choice& choice : options_of(of)) {
      out += "complete -c plumb -n '" + when + "'";
      for (const std::string& name : choice.names) {
        out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (choice.takes_value) out += choice.values.empty() ? " -r" : " -x -a " + fish_quoted(joined(choice.values));
      out += " -d " + fish_quoted(choice.help) + "\n";
    }
  };
  options(app, "__fish_use_subcommand");
  for (const CLI::App* command : commands) {
    const std::string name = command->get_name();
    names += " " + name;
    out += "complete -c plumb -n __fish_use_subcommand -f -a " + name + " -d " +
           fish_quoted(first_sentence(command->get_description())) + "\n";
    options(*command, "__fish_seen_subcommand_from " + name);
  }
  return out + "complete -c plumb -n '__fish_seen_subcommand_from help' -f -a " + fish_quoted(names.substr(1)) + "\n";
}

}  // namespace

void add_completion(CLI::App& app) {
  CLI::App* sub =
      app.add_subcommand("completion", "Prints what a shell needs to complete plumb's commands and options");
  const auto shell = std::make_shared<std::string>();
  sub->add_option("SHELL", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  sub->footer(
      "Examples, for the files that shells read at their start:\n  source <(plumb completion bash)    # ~/.bashrc\n"
      "  source <(plumb completion zsh)     # ~/.zshrc, after compinit\n"
      "  plumb completion fish | source     # ~/.config/fish/config.fish");
  sub->callback([&app, shell] {
    const Apps commands = std::as_const(app).get_subcommands([](const CLI::App*) { return true; });
    std::cout << (*shell == "bash" ? bash(app, commands) : *shell == "zsh" ? zsh(app, commands) : fish(app, commands));
  });
}

void add_help(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("help", "Shows what a command does and takes");
  const auto name = std::make_shared<std::string>();
  sub->add_option("COMMAND", *name, "A command; none: all of them");
  sub->callback([&app, name] {
    if (name->empty()) {
      std::cout << app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal);
    } else {
      std::cout << command_named(app, *name).help("plumb");
    }
  });
}

CLI::App& command_named(CLI::App& app, const std::string& name) {
  std::vector<std::string> names;
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == name) return *command;
    names.push_back(command->get_name());
  }
  const std::string like = nearest_name(name, names);
  throw UsageError("no command '" + name + "'", like.empty() ? "plumb --help" : "plumb " + like + ", or plumb --help");
}

std::string unknown_option(const CLI::App& command) {
  for (const std::string& word : command.remaining()) {
    if (!word.starts_with("-") || word.size() < 2) continue;
    const std::string name = word.substr(0, word.find('='));
    std::vector<std::string> names;
    for (const Choice& choice : options_of(command))
      names.insert(names.end(), choice.names.begin(), choice.names.end());
    const std::string like = nearest_name(name, names), help = "plumb " + command.get_name() + " --help";
    return command.get_name() + " has no option " + name + "\n  try: " + (like.empty() ? "" : like + ", or ") + help;
  }
  return "";
}

}  // namespace plumb::cli
