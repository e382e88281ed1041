# stand_in.rb FORMULA ARCHIVE CELLAR OPT: runs the blocks install and test of a formula where Homebrew is not: from the
# unpacked ARCHIVE into CELLAR/NAME/VERSION, with dependencies in the prefix OPT. It has as much of Homebrew's language as
# our formula uses, so a word that is not here fails. `brew audit`, bottles and macOS remain for Homebrew itself.
require "digest"
require "fileutils"
require "open3"
require "pathname"
require "tmpdir"

formula, archive, cellar, opt = ARGV.map { |word| File.expand_path(word) }
PREFIX = Pathname(opt)
CELLAR = Pathname(cellar)

module OS
  def self.mac? = RUBY_PLATFORM.include?("darwin")
end

def ENV.cc = fetch("CC", "cc")

class Pathname
  # Copies files into this folder, as Homebrew moves them.
  def install(*files)
    mkpath
    files.each { |file| FileUtils.cp(file, self) }
  end
end

class Formula
  class << self
    attr_reader :checks, :dependencies

    %i[desc homepage url sha256 license].each do |field|
      define_method(field) { |*value| value.empty? ? facts.fetch(field) : facts[field] = value.first }
    end
    def facts = (@facts ||= {})
    def depends_on(name) = (@dependencies ||= []) << (name.is_a?(Hash) ? name.keys.first : name)
    def uses_from_macos(name) = OS.mac? ? nil : depends_on(name)
    def on_macos = OS.mac? ? yield : nil
    def test(&block) = @checks = block
    def inherited(formula) = $formula = formula
    # Homebrew reads the version from the address too.
    def version = url[/-(\d+(\.\d+)+)-source\.tar\.gz\z/, 1] || raise("no version in #{url}")
  end

  attr_reader :testpath

  def initialize(testpath) = @testpath = Pathname(testpath)
  def name = self.class.name.downcase
  def prefix = CELLAR/name/self.class.version
  def bin = prefix/"bin"
  def lib = prefix/"lib"
  def pkgshare = prefix/"share"/name

  def std_cmake_args
    %W[-DCMAKE_INSTALL_PREFIX=#{prefix} -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_BUILD_TYPE=Release -DCMAKE_FIND_FRAMEWORK=LAST
       -DCMAKE_VERBOSE_MAKEFILE=ON -DFETCHCONTENT_FULLY_DISCONNECTED=ON -Wno-dev -DBUILD_TESTING=OFF]
  end

  def system(*words)
    puts "==> #{words.join(" ")}"
    Kernel.system(*words.map(&:to_s)) || raise("failed: #{words.join(" ")}")
  end

  def shell_output(command)
    out, status = Open3.capture2(command)
    raise "status #{status.exitstatus}: #{command}\n#{out}" unless status.success?

    out
  end

  def assert_match(pattern, text) = pattern.match?(text) || raise("#{pattern.inspect} is not in:\n#{text}")
end

load formula
raise "the formula's SHA-256 is not that of #{archive}" if $formula.sha256 != Digest::SHA256.file(archive).hexdigest
raise "the description has more than 80 characters" if "#{$formula.name}: #{$formula.desc}".length > 80

ENV["CMAKE_PREFIX_PATH"] = PREFIX.to_s
ENV["MAKEFLAGS"] = "-j#{`nproc`.chomp}"
Dir.mktmpdir do |folder|
  Dir.chdir(folder)
  Kernel.system("tar", "-xf", archive, "--strip-components=1") || raise("#{archive} cannot be unpacked")
  $formula.new(folder).install
end
Dir.mktmpdir do |folder|
  Dir.chdir(folder)
  built = $formula.new(folder)
  ENV["PKG_CONFIG_PATH"] = (built.lib/"pkgconfig").to_s
  built.instance_eval(&$formula.checks)
end
puts "ok   #{$formula.name} #{$formula.version}, with #{$formula.dependencies.join(", ")}"
